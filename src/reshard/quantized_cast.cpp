#include "reshard/quantized_cast.h"

#include <utility>

namespace tessera::reshard {

bool is_no_quantized_part(const formats::QuantizedTensors& quantized, std::size_t tensor_index,
                          const std::string& fqn, DType to, Remedy remedy, PlanReport& report) {
  const formats::QuantizedPart* const part = quantized.find(tensor_index);
  const auto doubt = part == nullptr ? quantized.doubt_in_words(tensor_index) : std::nullopt;
  if (part == nullptr && !doubt) return true;
  report.problem("cast", fqn, "numbers to cast to " + std::string(dtype_name(to)),
                 doubt ? *doubt : quantized.in_words(*part), std::move(remedy));
  return false;
}

}  // namespace tessera::reshard
