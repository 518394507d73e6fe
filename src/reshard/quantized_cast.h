#pragma once

#include <cstddef>
#include <string>

#include "formats/quantized_tensors.h"
#include "reshard/plan_report.h"
#include "tessera/base/dtype.h"

namespace tessera::reshard {

/// Checks that a cast changes no part of a quantized weight: codes would become numbers without
/// their scales, and scales would no longer fit their codes. `fqn` is the name for the problem.
/// Requires: the cast changes the dtype of the tensor.
bool is_no_quantized_part(const formats::QuantizedTensors& quantized, std::size_t tensor_index,
                          const std::string& fqn, DType to, Remedy remedy, PlanReport& report);

}  // namespace tessera::reshard
