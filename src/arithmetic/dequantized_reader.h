#pragma once

#include <memory>
#include <string>
#include <vector>

#include "arithmetic/rounding_losses.h"
#include "tessera/base/dtype.h"
#include "tessera/base/file_system.h"
#include "tessera/base/name_rules.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::arithmetic {

/// A checkpoint in which the quantized weights have become tensors of numbers.
struct DequantizedCheckpoint {
  std::unique_ptr<formats::CheckpointReader> reader;
  std::vector<formats::Finding> problems{};  // weights that cannot be turned into numbers
  bool has_weights = false;                  // whether there are quantized weights, selected or not
  std::size_t num_weights = 0;               // quantized weights that `only` selects
  std::size_t num_companions = 0;            // scales, zero points, …, which are left out
};

/// Whether weights can be dequantized to this dtype: float64, float32, float16 or bfloat16.
bool can_be_dequantized_to(DType dtype);

/// Returns a checkpoint in which each quantized weight is a tensor of numbers, in the dtype `to`:
/// codes times scales, computed in float32 and rounded. Reads elements when the caller asks for
/// them, in bounded memory. `losses`, if not null, counts by tensor the numbers that rounding made
/// zero or that were too large; the caller reads the counts later. `configs`: the content of the
/// checkpoint's config.json, or an empty list; if `reader` is a merge, one config.json per source,
/// in the order of the sources, with None for a source without one. `only` selects the weights that
/// must become numbers. The result has `reader` itself if there are problems or no quantized
/// weights.
/// Requires: `can_be_dequantized_to(to)`.
DequantizedCheckpoint dequantize(std::unique_ptr<formats::CheckpointReader> reader, DType to,
                                 const std::vector<Value>& configs, const NameSelection& only,
                                 reshard::OnOverflow on_overflow,
                                 std::shared_ptr<RoundingLosses> losses = nullptr);

}  // namespace tessera::arithmetic
