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

/// Returns the unit's parameter `fqn`, which may be any name of a tied parameter; nullptr if none.
const FlatUnitParameter* find(const fsdp::FlatParamHandle& handle, const std::string& fqn) {
  const FlatUnit& unit = handle.unit();
  for (const FlatUnitParameter& parameter : unit.parameters) {
    if (parameter.fqn == fqn) return &parameter;
  }
  for (const fsdp::SharedParameter& shared : handle.shared_parameters()) {
    if (shared.fqn == fqn) return &unit.parameters[shared.index];
  }
  return nullptr;
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
  for (const fsdp::UnitInTree& unit : fsdp::units_in_tree(module)) {
    const std::string prefix = unit.fqn.empty() ? "" : unit.fqn + ".";
    if (!fqn.starts_with(prefix)) continue;
    for (const auto& handle : unit.sharded->handles) {
      const FlatUnitParameter* const parameter = find(*handle, fqn.substr(prefix.size()));
      if (parameter == nullptr) continue;
      ParameterLocation location;
      location.flat_param = info_of(*handle);
      location.flat_param.module_fqn = unit.fqn;
      location.offset = parameter->offset;
      location.numel = numel_of(parameter->shape);
      location.shape = parameter->shape;
      const int num_ranks = handle->options().shard_group->size();
      for (int rank = 0; rank < num_ranks; ++rank) {
        location.held.push_back(shard_of_parameter(handle->unit(), *parameter, rank, num_ranks));
      }
      return location;
    }
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
