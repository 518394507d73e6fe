#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "arithmetic/quantized_matrix.h"
#include "tessera/base/name_rules.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::arithmetic {

/// A quantized weight, and the tensor of numbers that it becomes: `up.qweight` becomes `up.weight`.
struct QuantizedWeight {
  std::size_t codes = 0;       // index of the tensor of codes
  std::string codes_suffix{};  // the end of the codes' name: `qweight`
  std::string suffix{};        // replaces `codes_suffix` in the numbers' name
  Shape shape{};               // of the tensor of numbers
  bool is_transposed =
      false;  // whether the numbers' last two dimensions are those of the codes, swapped
  QuantizedMatrix matrix;
  std::size_t num_companions = 0;  // number of its scales, zero points, …
  /// Number of zero points that GPTQ stored as 2^bits - 1, the largest integer. GPTQ stores zero
  /// points minus 1, so some programs read 2^bits here, and others read 0.
  std::int64_t num_disputed_zeros = 0;
};

/// The quantized weights of a checkpoint that can be turned into numbers.
struct QuantizedWeights {
  std::vector<QuantizedWeight> weights{};
  std::set<std::size_t> companions{};  // scales, zero points, …: tensors that the numbers replace
  std::vector<formats::Finding> problems{};  // weights that cannot be turned into numbers
};

/// Finds the quantized weights of `reader`. `configs`: as for `dequantize`. Reports only problems
/// of weights that `only` selects.
QuantizedWeights find_quantized_weights(const formats::CheckpointReader& reader,
                                        const std::vector<Value>& configs,
                                        const NameSelection& only);

}  // namespace tessera::arithmetic
