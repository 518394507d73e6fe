#include "runtime/replicate/add_and_multiply.h"

namespace tessera {
namespace {

template <class T>
void add_and_multiply_elements(T* sum, const T* addend, T factor, std::int64_t numel) {
  for (std::int64_t i = 0; i < numel; ++i) sum[i] = (sum[i] + addend[i]) * factor;
}

}  // namespace

void add_and_multiply(float* sum, const float* addend, float factor, std::int64_t numel) {
  add_and_multiply_elements(sum, addend, factor, numel);
}

void add_and_multiply(double* sum, const double* addend, double factor, std::int64_t numel) {
  add_and_multiply_elements(sum, addend, factor, numel);
}

}  // namespace tessera
