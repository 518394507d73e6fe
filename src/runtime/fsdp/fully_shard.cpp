#include "tessera/runtime/fsdp/fully_shard.h"

#include <torch/csrc/autograd/variable.h>
#include <torch/types.h>

#include <algorithm>

#include "runtime/dist/sync_states.h"
#include "runtime/fsdp/pass.h"
#include "runtime/fsdp/torch_save.h"
#include "runtime/fsdp/traversal.h"
#include "runtime/fsdp/unit_state_dict_hooks.h"
#include "runtime/keep_freed_memory.h"
#include "runtime/registry/gradient_hook.h"
#include "runtime/registry/mesh_around.h"
#include "runtime/registry/parameter_shards.h"
#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"
#include "tessera/runtime/dist/launch.h"

namespace tessera {

std::string_view to_string(ShardingStrategy strategy) {
  switch (strategy) {
    case ShardingStrategy::full_shard:
      return "FULL_SHARD";
    case ShardingStrategy::shard_grad_op:
      return "SHARD_GRAD_OP";
    case ShardingStrategy::no_shard:
      return "NO_SHARD";
    case ShardingStrategy::hybrid_shard:
      return "HYBRID_SHARD";
    case ShardingStrategy::hybrid_shard_zero2:
      return "HYBRID_SHARD_ZERO2";
  }
  return "";
}

namespace fsdp {
namespace {

using torch::nn::Module;

[[maybe_unused]] const bool kRefusesTorchSave = refuse_in_torch_save();

bool is_hybrid(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::hybrid_shard ||
         strategy == ShardingStrategy::hybrid_shard_zero2;
}

/// Returns, for each shard of a flat parameter, the ranks of the mesh that hold it, ascending.
std::vector<std::vector<int>> holders_of_shards(const FullyShardOptions& options) {
  const int world_size = options.mesh.world_size();
  const bool is_replicated = options.strategy == ShardingStrategy::no_shard;
  int num_parts = is_replicated ? 1 : world_size;
  int stride = 1;  // distance in the mesh between ranks with neighbouring shards
  if (is_hybrid(options.strategy)) {
    num_parts = options.mesh.axis("shard")->size();
    if (options.mesh.axes().back().name != "shard") stride = world_size / num_parts;
  }
  std::vector<std::vector<int>> holders(static_cast<std::size_t>(num_parts));
  for (int rank = 0; rank < world_size; ++rank) {
    holders[static_cast<std::size_t>(rank / stride % num_parts)].push_back(rank);
  }
  return holders;
}

HandleOptions handle_options(const FullyShardOptions& options) {
  HandleOptions handle;
  handle.strategy = options.strategy;
  handle.mixed_precision = options.mixed_precision;
  handle.freed_parameters = options.freed_parameters;
  handle.offload = options.offload;
  if (options.strategy == ShardingStrategy::no_shard) {
    handle.shard_group = std::make_shared<dist::Group>("shard");
    handle.replicate_group = options.mesh.world();
  } else if (is_hybrid(options.strategy)) {
    std::string names;
    bool has_both = options.mesh.axes().size() == 2;
    for (const dist::Mesh::Axis& axis : options.mesh.axes()) {
      names += (names.empty() ? "" : ", ") + axis.name;
      has_both = has_both && (axis.name == "replicate" || axis.name == "shard");
    }
    if (!has_both) {
      throw Error::expected(
          ErrorKind::invalid_argument, {}, "mesh of " + std::string(to_string(options.strategy)),
          "the axes replicate and shard", names,
          "init_from_env({.axes = {{\"replicate\", 2}, {\"shard\", -1}}}) makes them");
    }
    handle.shard_group = options.mesh.axis("shard");
    handle.replicate_group = options.mesh.axis("replicate");
  } else {
    if (options.mesh.axes().size() != 1) {
      throw Error::expected(ErrorKind::invalid_argument, {},
                            "mesh of " + std::string(to_string(options.strategy)), "one axis",
                            std::to_string(options.mesh.axes().size()) + " axes",
                            "was HYBRID_SHARD meant?");
    }
    handle.shard_group = options.mesh.world();
    handle.replicate_group = std::make_shared<dist::Group>("replicate");
  }
  handle.world_group = options.mesh.world();
  handle.holders = holders_of_shards(options);
  return handle;
}

/// Warns if a launcher has started several ranks, but the mesh has only this rank.
void warn_of_forgotten_mesh(const FullyShardOptions& options) {
  if (options.mesh.world_size() > 1) return;
  const auto launched = dist::launch_environment(dist::process_environment);
  if (!launched || launched->world_size == 1) return;
  TORCH_WARN_ONCE("fully_shard shards over this process only, but ", launched->launcher,
                  " started ", launched->world_size,
                  " ranks (is .mesh = dist::init_from_env() missing?)");
}

/// Calls `visit` for the modules of a unit, without the modules of units inside it.
template <class Visit>
void for_each_open_module(const ModulePtr& module, const FullyShardOptions& options,
                          const Visit& visit) {
  visit(*module);
  for (const auto& child : module->children()) {
    if (!is_closed(child, options)) for_each_open_module(child, options, visit);
  }
}

/// Sends rank 0's parameters and buffers to all ranks, each tensor once.
void sync_module_states(const ModulePtr& module, const FullyShardOptions& options) {
  dist::StateSync sync(*options.mesh.world());
  for (const FoundParameter& parameter : unmanaged_parameters(module, options)) {
    sync.sync(parameter.fqn, parameter.tensor);
  }
  for_each_open_module(module, options, [&](const Module& each) {
    for (const auto& buffer : each.named_buffers(false)) sync.sync(buffer.key(), buffer.value());
  });
}

void cast_buffers(const ModulePtr& module, const FullyShardOptions& options) {
  const auto& dtype = options.mixed_precision.buffer_dtype;
  if (!dtype) return;
  for_each_open_module(module, options, [&](Module& each) {
    bool has_cast = false;
    for (auto& item : each.named_buffers(/*recurse=*/false)) {
      at::Tensor& buffer = item.value();
      if (!buffer.defined() || !buffer.is_floating_point()) continue;
      bool is_cast = registry::find_shard(buffer).has_value();  // perhaps under another name
      if (buffer.scalar_type() != *dtype) {
        if (!is_cast) {
          registry::note_shard(buffer, {{item.key(),
                                         dtype_of(buffer.scalar_type()),
                                         {buffer.sizes().begin(), buffer.sizes().end()}},
                                        nullptr});
        }
        buffer.set_data(buffer.to(*dtype));
        is_cast = true;
      }
      has_cast = has_cast || is_cast;
    }
    if (has_cast) attach_state_dict_hooks_of_cast_buffers(each);
  });
}

/// Gives memory to the meta tensors of `module` itself, and calls `param_init_fn`. If that throws,
/// restores the meta tensors.
void materialize(const ModulePtr& module, const std::string& fqn,
                 const FullyShardOptions& options) {
  // The tensors that got memory, each with its old value, a meta tensor.
  std::vector<std::pair<at::Tensor, at::Tensor>> given;
  const auto give_memory = [&](const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_meta()) return;
    if (!options.param_init_fn) {
      throw Error::expected(ErrorKind::invalid_argument, {.fqn = join_fqn(fqn, name)},
                            "tensor for fully_shard", "a tensor with memory",
                            "a tensor on the meta device",
                            "set FullyShardOptions::param_init_fn, which gives it values");
    }
    const at::NoGradGuard no_grad;
    const at::Tensor memory = torch::empty_like(tensor, tensor.options().device(options.device));
    given.emplace_back(tensor, tensor.detach());
    // Changes the TensorImpl in place, because the module and its members hold it.
    tensor.unsafeGetTensorImpl()->shallow_copy_from(memory.getIntrusivePtr());
  };
  for (const auto& each : module->named_parameters(/*recurse=*/false)) {
    give_memory(each.key(), each.value());
  }
  for (const auto& each : module->named_buffers(/*recurse=*/false)) {
    give_memory(each.key(), each.value());
  }
  if (given.empty()) return;
  const at::NoGradGuard no_grad;
  try {
    options.param_init_fn(*module);
  } catch (...) {
    for (const auto& [tensor, before] : given) {
      tensor.unsafeGetTensorImpl()->shallow_copy_from(before.getIntrusivePtr());
    }
    throw;
  }
}

void materialize_all(const ModulePtr& module, const std::string& fqn,
                     const FullyShardOptions& options) {
  materialize(module, fqn, options);
  for (const auto& child : module->named_children()) {
    if (!is_closed(child.value(), options)) {
      materialize_all(child.value(), join_fqn(fqn, child.key()), options);
    }
  }
}

/// Throws if parameters of the module are in the unit of an outer module, one above this module.
/// This module can then no longer become a unit. A parameter that is tied to a parameter of some
/// other unit is no reason to throw.
void refuse_module_of_unit(const Module& module) {
  const std::vector<at::Tensor> parameters = module.parameters();
  for (const at::Tensor& parameter : parameters) {
    const auto handle = FlatParamHandle::of(parameter);
    const ModulePtr owner = handle ? handle->owner().lock() : nullptr;
    if (!owner || owner.get() == &module) continue;
    const auto inside = owner->modules(/*include_self=*/false);
    if (std::ranges::find(inside, &module, &ModulePtr::get) == inside.end()) continue;
    throw Error::expected(
        ErrorKind::invalid_argument, {}, "fully_shard of " + module.name(),
        "a module whose parameters are in no unit yet",
        "parameters of the unit " + owner->name() + ", an outer module that was sharded before",
        "call fully_shard on inner modules first, or set "
        "FullyShardOptions::policy");
  }
}

/// Throws unless the parameter `found` can be in the same unit as the parameter `first`.
void refuse_unfit(const FoundParameter& found, const FoundParameter& first) {
  if (found.tensor.device() != first.tensor.device()) {
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = found.fqn}, "device",
                          first.tensor.device().str() + ", like " + first.fqn,
                          found.tensor.device().str());
  }
  if (!found.tensor.is_leaf() || !at::isFloatingType(found.tensor.scalar_type())) {
    throw Error::expected(ErrorKind::unsupported, {.fqn = found.fqn}, "parameter",
                          "a floating-point leaf tensor",
                          std::string(c10::toString(found.tensor.scalar_type())) +
                              (found.tensor.is_leaf() ? "" : " with a graph"),
                          "to leave it out, put it into ignored_states");
  }
  if (registry::gradient_hook(found.tensor) != nullptr) {
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = found.fqn},
                          "parameter for fully_shard", "a parameter that no other API manages",
                          "a parameter that replicate manages",
                          "is it tied to a weight of a replicated module? to leave it out, put it "
                          "into ignored_states");
  }
  if (found.tensor.grad().defined()) {
    throw Error::expected(
        ErrorKind::invalid_argument, {.fqn = found.fqn}, "parameter for fully_shard",
        "a parameter without a gradient", "a parameter with an unsharded gradient",
        "call fully_shard before the first backward, and create the optimizer after fully_shard");
  }
}

/// The parameters that go into one flat parameter.
struct DtypeGroup {
  at::ScalarType dtype;
  std::vector<ManagedParameter> parameters;
  std::vector<SharedParameter> shared;
};

/// Adds a parameter to the group. If the group has the same tensor under another name, adds only
/// the name.
void add_to(DtypeGroup& group, const FoundParameter& found) {
  const auto tied = std::ranges::find_if(group.parameters, [&](const ManagedParameter& each) {
    return each.tensor.is_same(found.tensor);
  });
  if (tied != group.parameters.end()) {
    group.shared.push_back({found.fqn, static_cast<std::size_t>(tied - group.parameters.begin())});
  } else {
    group.parameters.push_back({found.fqn, found.tensor});
  }
}

/// Returns the parameters of `module` that are in no unit yet, in one group per dtype, in order of
/// first appearance. Throws: Error naming a parameter that cannot be sharded.
std::vector<DtypeGroup> group_by_dtype(const ModulePtr& module, const FullyShardOptions& options) {
  std::vector<DtypeGroup> groups;
  const std::vector<FoundParameter> all = unmanaged_parameters(module, options);
  for (const FoundParameter& found : all) {
    refuse_unfit(found, all.front());
    const at::ScalarType dtype = found.tensor.scalar_type();
    auto group = std::ranges::find(groups, dtype, &DtypeGroup::dtype);
    if (group == groups.end()) group = groups.insert(groups.end(), DtypeGroup{dtype, {}, {}});
    add_to(*group, found);
  }
  return groups;
}

/// Puts the parameters of `module` that are in no unit yet into flat parameters, one per dtype.
void make_unit(const NamedModule& at, const FullyShardOptions& options) {
  const ModulePtr& module = at.module;
  std::vector<DtypeGroup> groups = group_by_dtype(module, options);
  auto unit = std::make_shared<ShardedModule>();
  unit->module = module;
  unit->mixed_precision = options.mixed_precision;
  unit->forward_prefetch = options.forward_prefetch;
  unit->limit_all_gathers = options.limit_all_gathers;
  unit->backward_prefetch = options.backward_prefetch;
  for (DtypeGroup& group : groups) {
    unit->handles.push_back(FlatParamHandle::create(
        module, at.fqn, group.parameters, std::move(group.shared), handle_options(options)));
  }
  if (unit->handles.empty()) refuse_module_of_unit(*module);
  attach_state_dict_hooks(*module);
  const auto is_managed = [](const at::Tensor& parameter) {
    return FlatParamHandle::of(parameter) != nullptr;
  };
  for_each_open_module(module, options, [&](Module& each) {
    registry::note_mesh_around(each, options.mesh, is_managed);
  });
  registry::attach(*module, std::move(unit));
  registry::note_applied(*module, "fully_shard", options.mesh);
}

}  // namespace
}  // namespace fsdp

void fully_shard(torch::nn::Module& module, const FullyShardOptions& options) {
  const fsdp::ModulePtr root = registry::weak_module(module).lock();
  if (const auto api = registry::applied_api(module)) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "fully_shard of " + module.name(),
                          "a module that is not sharded or replicated yet",
                          "a module that " + *api + " was applied to");
  }
  fsdp::warn_of_forgotten_mesh(options);
  const std::vector<fsdp::NamedModule> units = fsdp::units_by_policy(root, options);
  // Goes through the tree backwards, so that inner modules become units before outer ones.
  for (auto unit = units.rbegin(); unit != units.rend(); ++unit) {
    fsdp::materialize_all(unit->module, unit->fqn, options);
    if (options.module_states == FullyShardOptions::ModuleStates::sync) {
      fsdp::sync_module_states(unit->module, options);
    }
    fsdp::cast_buffers(unit->module, options);
    fsdp::make_unit(*unit, options);
  }
  if (options.strategy == ShardingStrategy::no_shard) keep_freed_memory();
}

void set_reshard_after_forward(torch::nn::Module& module, bool reshard_after_forward,
                               bool recurse) {
  const auto own = registry::find<fsdp::ShardedModule>(module);
  if (!own) {
    throw Error::expected(ErrorKind::invalid_argument, {},
                          "set_reshard_after_forward of " + module.name(), "a fully sharded module",
                          "a module that fully_shard was not applied to");
  }
  const auto set = [&](const fsdp::ShardedModule& unit) {
    for (const auto& handle : unit.handles) {
      handle->set_reshards_after_forward(reshard_after_forward);
    }
  };
  if (!recurse) return set(*own);
  for (const fsdp::UnitInTree& unit : fsdp::units_in_tree(module)) set(*unit.sharded);
}

ExecutionInfo execution_info(const torch::nn::Module& root) {
  ExecutionInfo info;
  const auto pass = registry::find<fsdp::Pass>(root);
  if (!pass) return info;
  for (const fsdp::ParameterUse& use : pass->forward_order()) {
    const FlatUnit& unit = pass->handles()[use.handle]->unit();
    const std::string& fqn = unit.parameters[use.parameter].fqn;
    info.param_forward_order.push_back(fsdp::join_fqn(unit.name, fqn));
    auto usage = std::ranges::find(info.module_to_param_usage_infos, unit.name,
                                   &ExecutionInfo::ParamUsageInfo::module_fqn);
    if (usage == info.module_to_param_usage_infos.end()) {
      info.module_forward_order.push_back(unit.name);
      usage = info.module_to_param_usage_infos.insert(usage, {unit.name, {}});
    }
    usage->params.push_back(fqn);
  }
  return info;
}

std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> fsdp_modules(
    const torch::nn::Module& module) {
  std::vector<std::pair<std::string, std::shared_ptr<torch::nn::Module>>> modules;
  for (const fsdp::UnitInTree& unit : fsdp::units_in_tree(module)) {
    modules.emplace_back(unit.fqn, unit.sharded->module.lock());
  }
  return modules;
}

std::vector<NamedStream> streams(const torch::nn::Module& root) {
  const auto pass = registry::find<fsdp::Pass>(root);
  if (!pass) return {};
  const fsdp::Streams& streams = pass->streams();
  return {{"default", streams.default_stream},
          {"unshard", streams.unshard},
          {"pre_unshard", streams.pre_unshard},
          {"post_backward", streams.post_backward},
          {"all_reduce", streams.all_reduce}};
}

std::vector<std::string> recorded_order(const torch::nn::Module& root) {
  const auto pass = registry::find<fsdp::Pass>(root);
  return pass ? pass->collectives() : std::vector<std::string>();
}

}  // namespace tessera
