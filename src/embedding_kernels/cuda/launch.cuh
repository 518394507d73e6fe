#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <type_traits>

#ifndef __CUDACC__
#include "cuda_on_cpu/cuda_on_cpu.h"  // in tests/: runs kernels on the CPU
#endif

namespace tessera::embedding::cuda {

/// Starts a kernel. Does not report a failed start; call `cudaGetLastError` afterwards.
template <class... Parameters>
void launch(void (*kernel)(Parameters...), unsigned num_blocks, int num_threads,
            std::size_t shared_nbytes, cudaStream_t stream,
            std::type_identity_t<Parameters>... arguments) {
#ifdef __CUDACC__
  kernel<<<num_blocks, static_cast<unsigned>(num_threads), shared_nbytes, stream>>>(arguments...);
#else
  cuda_on_cpu::launch(num_blocks, static_cast<unsigned>(num_threads), shared_nbytes, stream,
                      [=] { kernel(arguments...); });
#endif
}

/// Returns the block's dynamic shared memory.
__device__ inline float* shared_floats() {
#ifdef __CUDACC__
  extern __shared__ float memory[];
  return memory;
#else
  return cuda_on_cpu::shared_floats();
#endif
}

}  // namespace tessera::embedding::cuda
