#pragma once

#include <cstddef>
#include <string>

#include "formats/quantized_tensors.h"
#include "reshard/plan_report.h"
#include "tessera/base/dtype.h"

namespace tessera::reshard {

/// Returns whether a tensor may be cast: false, with a problem about `fqn`, if it is, or may be,
/// the codes or scales of a quantized weight. Cast codes would be numbers without their scales, and
/// cast scales would not fit their codes. Requires: the cast changes the tensor's dtype.
bool is_no_quantized_part(const formats::QuantizedTensors& quantized, std::size_t tensor_index,
                          const std::string& fqn, DType to, Remedy remedy, PlanReport& report);

}  // namespace tessera::reshard
