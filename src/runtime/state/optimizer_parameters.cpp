#include "runtime/state/optimizer_parameters.h"

#include <torch/types.h>

#include <unordered_map>
#include <unordered_set>

#include "runtime/state/sharded_state_dict.h"
#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"
#include "tessera/runtime/registry/fused_updates.h"

namespace tessera::state {

namespace {

struct NamedParameter {
  at::Tensor tensor;
  std::string fqn;
};

/// Returns the parameters of each group.
std::vector<std::vector<NamedParameter>> named_parameters(
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
                              "a parameter of the model", "none of it",
                              "an optimizer of another model, or a module that was replaced?");
      }
      of_group.push_back({tensor, it->second});
    }
  }
  return parameters;
}

}  // namespace

std::vector<std::vector<std::string>> parameter_names(const torch::nn::Module& model,
                                                      const torch::optim::Optimizer& optimizer) {
  std::vector<std::vector<std::string>> names;
  for (const auto& group : named_parameters(model, optimizer)) {
    std::vector<std::string>& of_group = names.emplace_back();
    for (const NamedParameter& parameter : group) of_group.push_back(parameter.fqn);
  }
  return names;
}

std::vector<OptimizerParameter> parameters_of(torch::nn::Module& model,
                                              const torch::optim::Optimizer& optimizer) {
  const StateDict state = sharded_state_dict(model);
  const auto groups = named_parameters(model, optimizer);
  std::vector<OptimizerParameter> parameters;
  for (std::size_t group = 0; group < groups.size(); ++group) {
    for (const NamedParameter& each : groups[group]) {
      const StateEntry* const entry = state.find(each.fqn);
      if (entry == nullptr || !std::holds_alternative<StateTensor>(*entry)) {
        throw Error::expected(ErrorKind::invalid_argument, {.fqn = each.fqn},
                              "parameter of the optimizer", "a tensor of the model's state dict",
                              "none", "a state dict hook that renames or erases it?");
      }
      parameters.push_back({group, each.tensor, each.fqn, std::get<StateTensor>(*entry)});
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
  for (const TensorPart& part : entry.parts) held += numel_of(part.region);
  if (local.numel() != held) {
    throw Error::expected(
        ErrorKind::invalid_argument, {.fqn = parameter.fqn}, "optimizer state of the parameter",
        std::to_string(held) + " elements, as this rank holds of it", std::to_string(local.numel()),
        "an optimizer that had state before fully_shard?");
  }
  const at::Tensor flat = local.detach().contiguous().view({-1});
  std::int64_t begin = 0;
  for (TensorPart& part : entry.parts) {
    part.tensor = flat.narrow(0, begin, numel_of(part.region));
    begin += numel_of(part.region);
  }
  return entry;
}

at::Tensor step_tensor(std::int64_t step) {
  const auto real = static_cast<float>(step);
  if (static_cast<std::int64_t>(real) != step) return torch::tensor(step, at::kLong);
  return torch::tensor(real, at::kFloat);
}

}  // namespace tessera::state
