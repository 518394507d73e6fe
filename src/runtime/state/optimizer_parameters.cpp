#include "runtime/state/optimizer_parameters.h"

#include <torch/types.h>

#include <unordered_map>
#include <unordered_set>

#include "runtime/state/sharded_state_dict.h"
#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"
#include "tessera/runtime/registry/fused_updates.h"
#include "tessera/runtime/registry/parameters.h"

namespace tessera::state {

namespace {

struct NamedParameter {
  at::Tensor tensor;
  std::string module_fqn;
};

[[noreturn]] void refuse_held_twice(const std::string& fqn, std::size_t first_group,
                                    std::size_t second_group) {
  const std::string first = std::to_string(first_group);
  throw Error::expected(
      ErrorKind::invalid_argument, {.fqn = fqn}, "parameter of the optimizer", "one entry",
      first_group == second_group
          ? "two entries in group " + first
          : "entries in group " + first + " and in group " + std::to_string(second_group),
      "Module::parameters() lists a tied weight once for each of its names; "
      "tessera::parameters(model) lists it once");
}

/// Returns the parameters of each group.
std::vector<std::vector<NamedParameter>> parameters_by_group(
    const torch::nn::Module& model, const torch::optim::Optimizer& optimizer) {
  std::unordered_map<const at::TensorImpl*, std::string> fqns;
  for (const auto& each : model.named_parameters()) {
    fqns.emplace(each.value().unsafeGetTensorImpl(), each.key());
  }
  std::unordered_set<const at::TensorImpl*> fused;
  for (const auto& found : registry::find_fused_updates(model)) {
    for (const auto& each : found.updates->parameters()) {
      fused.insert(each.tensor.unsafeGetTensorImpl());
    }
  }
  std::vector<std::vector<NamedParameter>> parameters;
  for (const auto& group : optimizer.param_groups()) {
    std::vector<NamedParameter>& of_group = parameters.emplace_back();
    for (const at::Tensor& tensor : group.params()) {
      if (fused.contains(tensor.unsafeGetTensorImpl())) continue;
      const auto it = fqns.find(tensor.unsafeGetTensorImpl());
      if (it == fqns.end()) {
        throw Error::expected(ErrorKind::invalid_argument, {},
                              "parameter " + std::to_string(of_group.size()) +
                                  " of the optimizer's group " +
                                  std::to_string(parameters.size() - 1),
                              "a parameter of the model", "a tensor that is not in the model",
                              "is it an optimizer of another model, or was a module replaced?");
      }
      of_group.push_back({tensor, it->second});
    }
  }
  return parameters;
}

}  // namespace

ParameterKeys::ParameterKeys(torch::nn::Module& model) : state_dict_(sharded_state_dict(model)) {
  for (const StateDict::Item& item : state_dict_) {
    const auto* const tensor = std::get_if<StateTensor>(&item.entry);
    if (tensor == nullptr || tensor->module_fqn.empty()) continue;
    const auto [it, is_new] = keys_.emplace(tensor->module_fqn, item.fqn);
    // If a hook has copied the entry under a new key, two entries have the same tensor. The entry
    // with the original key is the parameter's.
    if (!is_new && item.fqn == tensor->module_fqn) it->second = item.fqn;
  }
}

const std::string& ParameterKeys::of(const std::string& module_fqn) const {
  const auto it = keys_.find(module_fqn);
  return it == keys_.end() ? module_fqn : it->second;
}

const StateTensor* ParameterKeys::entry(const std::string& module_fqn) const {
  const StateEntry* const found = state_dict_.find(of(module_fqn));
  return found == nullptr ? nullptr : std::get_if<StateTensor>(found);
}

void refuse_parameters_held_twice(const torch::nn::Module& model,
                                  const torch::optim::Optimizer& optimizer) {
  std::unordered_map<const at::TensorImpl*, std::size_t> group_of;
  for (std::size_t group = 0; group < optimizer.param_groups().size(); ++group) {
    for (const at::Tensor& tensor : optimizer.param_groups()[group].params()) {
      const auto [first, is_new] = group_of.emplace(tensor.unsafeGetTensorImpl(), group);
      if (is_new) continue;
      for (const auto& each : model.named_parameters()) {
        if (each.value().is_same(tensor)) refuse_held_twice(each.key(), first->second, group);
      }
    }
  }
}

std::vector<std::vector<std::string>> parameter_names(torch::nn::Module& model,
                                                      const torch::optim::Optimizer& optimizer) {
  refuse_parameters_held_twice(model, optimizer);
  const ParameterKeys keys(model);
  std::vector<std::vector<std::string>> names;
  for (const auto& group : parameters_by_group(model, optimizer)) {
    std::vector<std::string>& of_group = names.emplace_back();
    for (const NamedParameter& parameter : group) of_group.push_back(keys.of(parameter.module_fqn));
  }
  return names;
}

std::vector<OptimizerParameter> parameters_of(torch::nn::Module& model,
                                              const torch::optim::Optimizer& optimizer) {
  refuse_parameters_held_twice(model, optimizer);
  const ParameterKeys keys(model);
  std::unordered_map<const at::TensorImpl*, Shape> shapes;
  for (WholeParameter& each : whole_parameters(model)) {
    shapes.emplace(each.tensor.unsafeGetTensorImpl(), std::move(each.shape));
  }
  const auto groups = parameters_by_group(model, optimizer);
  std::vector<OptimizerParameter> parameters;
  for (std::size_t group = 0; group < groups.size(); ++group) {
    for (const NamedParameter& each : groups[group]) {
      const StateTensor* const entry = keys.entry(each.module_fqn);
      if (entry == nullptr) {
        throw Error::expected(ErrorKind::invalid_argument, {.fqn = each.module_fqn},
                              "parameter of the optimizer", "a tensor of the model's state dict",
                              "none",
                              "does a state dict hook erase it, or make a new entry instead of "
                              "renaming the old one?");
      }
      const Shape& shape = shapes.at(each.tensor.unsafeGetTensorImpl());
      if (entry->shape != shape) {
        throw Error::expected(
            ErrorKind::unsupported, {.fqn = each.module_fqn},
            "parameter of the optimizer in the model's state dict",
            shape_to_string(shape) + ", as in the model", shape_to_string(entry->shape),
            "does a state dict hook change its shape? the optimizer's state keeps the old shape");
      }
      parameters.push_back({group, each.tensor, keys.of(each.module_fqn), *entry});
    }
  }
  return parameters;
}

StateTensor laid_out_as(const OptimizerParameter& parameter, const at::Tensor& local) {
  StateTensor entry = parameter.layout;
  entry.dtype = dtype_of(local.scalar_type());
  entry.kind = formats::StateKind::pointwise;
  entry.parameter = parameter.fqn;
  std::int64_t held = 0;
  for (const LocalShard& local_shard : entry.local_shards) held += numel_of(local_shard.region);
  if (local.numel() != held) {
    throw Error::expected(
        ErrorKind::invalid_argument, {.fqn = parameter.fqn}, "optimizer state of the parameter",
        std::to_string(held) + " elements, this rank's shard", std::to_string(local.numel()),
        "did the optimizer have state before fully_shard?");
  }
  const at::Tensor flat = local.detach().contiguous().view({-1});
  std::int64_t begin = 0;
  for (LocalShard& local_shard : entry.local_shards) {
    local_shard.tensor = flat.narrow(0, begin, numel_of(local_shard.region));
    begin += numel_of(local_shard.region);
  }
  return entry;
}

at::Tensor step_tensor(std::int64_t step) {
  const auto real = static_cast<float>(step);
  if (static_cast<std::int64_t>(real) != step) return torch::tensor(step, at::kLong);
  return torch::tensor(real, at::kFloat);
}

}  // namespace tessera::state
