#include "reshard/quantized_cast.h"

#include <utility>

namespace tessera::reshard {

bool is_no_quantized_part(const formats::QuantizedTensors& quantized, std::size_t tensor_index,
                          const std::string& fqn, DType to, Remedy remedy, PlanReport& report) {
  const formats::QuantizedPart* const part = quantized.find(tensor_index);
  if (part == nullptr) return true;
  report.problem("cast", fqn, "numbers to cast to " + std::string(dtype_name(to)),
                 quantized.in_words(*part), std::move(remedy));
  return false;
}

}  // namespace tessera::reshard
