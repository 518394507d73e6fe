#include "formats/megatron/same_numbers.h"

#include <algorithm>
#include <cstddef>

#include "base/cast.h"

namespace tessera::formats::megatron {
namespace {

constexpr std::int64_t kNumCompared = 16;

}  // namespace

bool have_same_numbers(const Elements& weights, const Parameter& parameter) {
  const DType dtype = parameter.meta().dtype;
  const DType of_weights = weights.dtype();
  if (!can_cast(of_weights, dtype)) return false;
  const std::int64_t numel = std::min(parameter.meta().numel(), kNumCompared);
  const auto count = static_cast<std::size_t>(numel);
  std::vector<std::byte> mine(count * itemsize(of_weights));
  std::vector<std::byte> rounded(count * itemsize(dtype));
  std::vector<std::byte> of_model(rounded.size());
  weights.file->reader().read_piece(weights.tensor, 0, {weights.begin, weights.begin + numel},
                                    mine);
  parameter.file->reader().read_piece(parameter.entry->index, 0, {0, numel}, of_model);
  cast_elements(of_weights, mine, dtype, rounded);
  return rounded == of_model;
}

}  // namespace tessera::formats::megatron
