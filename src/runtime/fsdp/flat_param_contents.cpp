#include "runtime/fsdp/flat_param_contents.h"

#include <algorithm>

#include "runtime/fsdp/traversal.h"
#include "runtime/torch_bridge.h"

namespace tessera::fsdp {
namespace {

using at::Tensor;

/// Alignment for vectorised kernels, as in PyTorch's FSDP with use_orig_params.
constexpr std::int64_t kAlignmentNbytes = 16;

/// Moves parameters so that each offset is a multiple of `numel` elements.
void align(FlatUnit& unit, std::int64_t numel) {
  std::int64_t end = 0;
  for (FlatUnitParameter& parameter : unit.parameters) {
    parameter.offset = (end + numel - 1) / numel * numel;
    end = parameter.offset + numel_of(parameter.shape);
  }
}

FlatUnit aligned_unit(const std::string& name, const std::vector<ManagedParameter>& parameters,
                      const MixedPrecision& precision) {
  std::vector<std::pair<std::string, Shape>> shapes;
  for (const ManagedParameter& parameter : parameters) {
    shapes.emplace_back(parameter.fqn,
                        Shape(parameter.tensor.sizes().begin(), parameter.tensor.sizes().end()));
  }
  const at::ScalarType own_dtype = parameters.front().tensor.scalar_type();
  FlatUnit unit = make_flat_unit(name, dtype_of(own_dtype), std::move(shapes));
  const at::ScalarType compute_dtype = precision.param_dtype.value_or(own_dtype);
  align(unit, kAlignmentNbytes / static_cast<std::int64_t>(c10::elementSize(compute_dtype)));
  return unit;
}

}  // namespace

FlatParamContents::FlatParamContents(const std::string& unit_name,
                                     const std::vector<ManagedParameter>& parameters,
                                     std::vector<SharedParameter> shared, HandleOptions options)
    : unit_(aligned_unit(unit_name, parameters, options.mixed_precision)),
      shared_(std::move(shared)),
      options_(std::move(options)) {
  for (const ManagedParameter& parameter : parameters) {
    weak_parameters_.emplace_back(parameter.tensor);
  }
}

std::string FlatParamContents::display_name() const {
  return unit_.name.empty() ? "the root" : unit_.name;
}

std::size_t FlatParamContents::index_of(const Tensor& parameter) const {
  for (std::size_t i = 0; i < weak_parameters_.size(); ++i) {
    if (this->parameter(i).is_same(parameter)) return i;
  }
  TESSERA_CHECK(false);
}

void FlatParamContents::refuse(ErrorKind kind, std::size_t index, const std::string& expected,
                               const std::string& found, const std::string& likely_cause) const {
  const std::string& fqn = unit_.parameters[index].fqn;
  throw Error::expected(kind, {.fqn = join_fqn(unit_.name, fqn)},
                        "parameter of a fully sharded module", expected, found, likely_cause);
}

at::ScalarType FlatParamContents::own_dtype() const {
  return scalar_type_of(unit_.dtype);
}

at::ScalarType FlatParamContents::param_dtype() const {
  return options_.mixed_precision.param_dtype.value_or(own_dtype());
}

at::ScalarType FlatParamContents::reduce_dtype() const {
  return options_.mixed_precision.reduce_dtype.value_or(param_dtype());
}

Tensor FlatParamContents::full_view(const Tensor& flat, std::size_t index) const {
  const FlatUnitParameter& parameter = unit_.parameters[index];
  return flat.narrow(0, parameter.offset, numel_of(parameter.shape)).view(parameter.shape);
}

/// If the shard group has one rank, the shard is the whole parameter, in its own shape.
Tensor FlatParamContents::sharded_view(const Tensor& flat_shard, std::size_t index) const {
  if (!is_sharded()) return full_view(flat_shard, index);
  const FlatUnitParameter& parameter = unit_.parameters[index];
  const int rank = shard_group().rank();
  const FlatRange range = shard_of_parameter(unit_, parameter, rank, shard_group().size());
  if (range.numel() == 0) return flat_shard.narrow(0, 0, 0);
  return flat_shard.narrow(0, parameter.offset + range.begin - rank * flat_shard.numel(),
                           range.numel());
}

/// Finds the last parameter that begins at or before `position`. So it never finds an empty
/// parameter, which begins where the next parameter begins.
std::size_t FlatParamContents::parameter_at(std::int64_t position) const {
  const auto after =
      std::ranges::upper_bound(unit_.parameters, position, {}, &FlatUnitParameter::offset);
  return static_cast<std::size_t>(after - unit_.parameters.begin()) - 1;
}

void FlatParamContents::zero_padding(const Tensor& flat) const {
  std::int64_t end = 0;
  const auto zero = [&](std::int64_t next) {
    if (next > end) flat.narrow(0, end, next - end).zero_();
  };
  for (const FlatUnitParameter& parameter : unit_.parameters) {
    zero(parameter.offset);
    end = parameter.offset + numel_of(parameter.shape);
  }
  zero(flat.numel());
}

}  // namespace tessera::fsdp
