#pragma once

#include <cstddef>
#include <string>

#include "formats/quantized_tensors.h"
#include "reshard/plan_report.h"
#include "tessera/base/dtype.h"

namespace tessera::reshard {

/// Checks that a tensor is no part of a quantized weight, because a cast would damage that weight:
/// codes would become numbers without their scales, and scales would no longer fit their codes. If
/// it is a part, reports a problem about `fqn` and returns false. Requires: the cast changes the
/// dtype of the tensor.
bool is_no_quantized_part(const formats::QuantizedTensors& quantized, std::size_t tensor_index,
                          const std::string& fqn, DType to, Remedy remedy, PlanReport& report);

}  // namespace tessera::reshard
