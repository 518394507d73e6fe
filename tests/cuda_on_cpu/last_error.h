#pragma once

#include <cuda_runtime_api.h>

namespace cuda_on_cpu {

/// Sets what `cudaGetLastError` returns next.
void set_last_error(cudaError_t error);

}  // namespace cuda_on_cpu
