#include "tessera/runtime/fsdp/parameter_map.h"

#include <torch/types.h>

#include <algorithm>

#include "runtime/fsdp/flat_param_handle.h"
#include "runtime/fsdp/pass.h"
#include "runtime/fsdp/traversal.h"

namespace tessera {
namespace {

FlatParameterInfo info_of(const fsdp::FlatParamHandle& handle) {
  const FlatUnit& unit = handle.unit();
  FlatParameterInfo info;
  info.module_fqn = unit.name;
  info.dtype = unit.dtype;
  info.strategy = handle.options().strategy;
  for (const FlatUnitParameter& parameter : unit.parameters) {
    info.parameters.push_back(
        {parameter.fqn, parameter.shape, parameter.offset, numel_of(parameter.shape)});
  }
  for (const fsdp::SharedParameter& shared : handle.shared_parameters()) {
    info.shared[shared.fqn] = unit.parameters[shared.index].fqn;
  }
  info.unpadded_numel = unpadded_numel(unit);
  info.sharded_numel = handle.storage().sharded_flat_param().numel();
  info.is_unsharded = handle.gather().is_unsharded();
  return info;
}

}  // namespace

std::vector<FlatParameterInfo> handles(const torch::nn::Module& module) {
  std::vector<FlatParameterInfo> infos;
  for (const fsdp::UnitInTree& unit : fsdp::units_in_tree(module)) {
    for (const auto& handle : unit.sharded->handles) {
      infos.push_back(info_of(*handle));
      infos.back().module_fqn = unit.fqn;
    }
  }
  return infos;
}

std::optional<FlatParameterInfo> flat_param_of(const at::Tensor& parameter) {
  const auto handle = fsdp::FlatParamHandle::of(parameter);
  if (!handle) return std::nullopt;
  return info_of(*handle);
}

std::optional<ParameterLocation> flat_param_of(const torch::nn::Module& module,
                                               const std::string& fqn) {
  const auto parameters = module.named_parameters();
  const at::Tensor* const tensor = parameters.find(fqn);
  const auto handle = tensor == nullptr ? nullptr : fsdp::FlatParamHandle::of(*tensor);
  if (!handle) return std::nullopt;
  for (const fsdp::UnitInTree& unit : fsdp::units_in_tree(module)) {
    if (std::ranges::find(unit.sharded->handles, handle) == unit.sharded->handles.end()) continue;
    const FlatUnitParameter& parameter = handle->unit().parameters[handle->index_of(*tensor)];
    ParameterLocation location;
    location.flat_param = info_of(*handle);
    location.flat_param.module_fqn = unit.fqn;
    location.offset = parameter.offset;
    location.numel = numel_of(parameter.shape);
    location.shape = parameter.shape;
    const int num_ranks = handle->options().shard_group->size();
    for (int rank = 0; rank < num_ranks; ++rank) {
      location.held.push_back(shard_of_parameter(handle->unit(), parameter, rank, num_ranks));
    }
    return location;
  }
  return std::nullopt;
}

std::optional<ElementOfParameter> element_at(const FlatParameterInfo& flat_param,
                                             std::int64_t offset) {
  for (const FlatParameterInfo::Parameter& parameter : flat_param.parameters) {
    const std::int64_t index = offset - parameter.offset;
    if (index >= 0 && index < parameter.numel) {
      return ElementOfParameter{fsdp::join_fqn(flat_param.module_fqn, parameter.fqn), index};
    }
  }
  return std::nullopt;
}

}  // namespace tessera
