#include "runtime/fsdp/unit_state_dict_hooks.h"

#include <torch/types.h>

#include <memory>

#include "runtime/fsdp/pass.h"
#include "runtime/fsdp/traversal.h"
#include "runtime/registry/own_state_dict_hooks.h"
#include "runtime/registry/parameter_shards.h"
#include "runtime/registry/state_tensor_conversion.h"
#include "runtime/torch_bridge.h"

namespace tessera::fsdp {
namespace {

using torch::nn::Module;

/// Calls `visit` with the name, handle and index of each sharded parameter of the module itself.
template <class Visit>
void for_each_managed(const Module& module, const Visit& visit) {
  for (const auto& each : module.named_parameters(/*recurse=*/false)) {
    if (!each.value().defined()) continue;
    if (const auto handle = FlatParamHandle::of(each.value())) {
      visit(each.key(), *handle, handle->index_of(each.value()));
    }
  }
}

/// Marks a module that has the hooks of `attach_to_owner`.
struct HasHooks final : registry::ModuleState {};

void attach_to_owner(Module& module) {
  registry::add_first_state_dict_post_hook(
      module, [](Module& owner, StateDict& state_dict, const std::string& prefix,
                 const StateDictOptions& options) {
        for_each_managed(owner,
                         [&](const std::string& name, FlatParamHandle& handle, std::size_t index) {
                           state::show_whole(state_dict, prefix + name, handle.state_of(index),
                                             *handle.options().world_group, options);
                         });
      });
  registry::add_last_load_state_dict_pre_hook(
      module,
      [](Module& owner, StateDict& state_dict, const std::string& prefix, LoadReport& report) {
        for_each_managed(
            owner, [&](const std::string& name, FlatParamHandle& handle, std::size_t index) {
              state::show_local_shard(state_dict, prefix + name, handle.state_of(index),
                                      handle.parameter(index), report);
            });
      });
}

}  // namespace

void attach_state_dict_hooks(Module& module) {
  for (const auto& each : module.modules()) {
    bool owns_some = false;
    for_each_managed(*each, [&](const auto&...) { owns_some = true; });
    if (!owns_some || registry::find<HasHooks>(*each)) continue;
    attach_to_owner(*each);
    registry::attach(*each, std::make_shared<HasHooks>());
  }
  registry::add_first_state_dict_post_hook(
      module, [](Module& owner, StateDict& state_dict, const std::string& prefix,
                 const StateDictOptions& options) {
        const auto sharded = registry::find<ShardedModule>(owner);
        if (options.type != SHARDED || !sharded) return;
        for (const auto& handle : sharded->handles) {
          FlatUnit named = handle->unit();
          named.name = prefix.empty() ? prefix : prefix.substr(0, prefix.size() - 1);
          for (FlatUnitParameter& parameter : named.parameters) {
            parameter.fqn = prefix + parameter.fqn;
          }
          state_dict.units.push_back(std::move(named));
        }
      });
}

namespace {

/// Marks a module that has the hooks of `attach_state_dict_hooks_of_cast_buffers`.
struct HasBufferHooks final : registry::ModuleState {};

/// Calls `visit` with name, tensor and own dtype of each buffer of the module that was cast.
template <class Visit>
void for_each_cast_buffer(const Module& module, const Visit& visit) {
  for (const auto& each : module.named_buffers(/*recurse=*/false)) {
    if (!each.value().defined()) continue;
    const auto cast = registry::find_shard(each.value());
    if (cast) visit(each.key(), each.value(), cast->whole.dtype);
  }
}

}  // namespace

void attach_state_dict_hooks_of_cast_buffers(Module& module) {
  if (registry::find<HasBufferHooks>(module)) return;
  registry::attach(module, std::make_shared<HasBufferHooks>());
  registry::add_first_state_dict_post_hook(module, [](Module& owner, StateDict& state_dict,
                                                      const std::string& prefix,
                                                      const StateDictOptions& /*options*/) {
    for_each_cast_buffer(owner, [&](const std::string& name, const at::Tensor&, DType own_dtype) {
      std::string fqn = prefix + name;
      StateEntry* entry = state_dict.find(fqn);
      if (entry != nullptr && std::holds_alternative<StateAlias>(*entry)) {
        fqn = std::get<StateAlias>(*entry).target;  // maybe of a module without these hooks
        entry = state_dict.find(fqn);
      }
      auto* const buffer = entry == nullptr ? nullptr : std::get_if<StateTensor>(entry);
      if (buffer == nullptr || buffer->dtype == own_dtype) return;
      StateTensor converted = StateTensor::whole(buffer->tensor(fqn).to(scalar_type_of(own_dtype)));
      converted.layout = buffer->layout;
      *entry = std::move(converted);
    });
  });
  registry::add_last_load_state_dict_pre_hook(module, [](Module& owner, StateDict& state_dict,
                                                         const std::string& prefix,
                                                         LoadReport& report) {
    for_each_cast_buffer(owner, [&](const std::string& name, const at::Tensor& buffer,
                                    DType own_dtype) {
      const std::string fqn = prefix + name;
      StateEntry* const entry = state_dict.find(fqn);
      if (entry == nullptr) return;
      if (const auto* const alias = std::get_if<StateAlias>(entry)) {
        const StateEntry* const target = state_dict.find(alias->target);
        const auto* const first = target == nullptr ? nullptr : std::get_if<StateTensor>(target);
        // The hook for the buffer's first name may have converted it.
        if (first != nullptr && first->dtype == dtype_of(buffer.scalar_type())) return;
      }
      const StateTensor* found = find_fitting(
          state_dict, fqn, own_dtype, Shape(buffer.sizes().begin(), buffer.sizes().end()), report);
      *entry = StateTensor::whole(found != nullptr && found->is_whole()
                                      ? found->tensor(fqn).to(buffer.scalar_type())
                                      : buffer);
    });
  });
}

}  // namespace tessera::fsdp
