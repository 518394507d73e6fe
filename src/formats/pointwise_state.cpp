#include "formats/pointwise_state.h"

#include <algorithm>
#include <iterator>

namespace tessera::formats {
namespace {

constexpr std::string_view kPointwiseNames[] = {
    "exp_avg",    "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer",
    "square_avg", "grad_avg",   "acc_delta",      "sum",
    "exp_inf",    "prev",       "step_size",      "ax",
    "fp32_param", "param",      "master_param"};

}  // namespace

bool is_pointwise_name(std::string_view name) {
  return std::ranges::find(kPointwiseNames, name) != std::end(kPointwiseNames);
}

bool is_quantized_state(std::string_view fqn, DType dtype) {
  const std::string_view last = fqn.substr(fqn.rfind('.') + 1);
  return itemsize(dtype) == 1 || last.starts_with("absmax") || last.starts_with("qmap");
}

}  // namespace tessera::formats
