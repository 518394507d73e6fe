#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstddef>
#include <functional>

/// Runs kernels of CUDA C++ on the CPU, for tests. The host's C++ compiler compiles a kernel as a
/// function. Each lane is a fiber, which runs until `__syncwarp`, `__shfl_xor_sync` or its end. The
/// lane to run next is random (TESSERA_TEST_SEED). A stream is a queue, which runs when the host
/// waits for the stream. AddressSanitizer sees each allocation of device memory. ThreadSanitizer
/// sees each lane as a thread that is synchronized with others only by these two functions and by
/// begin and end of a launch. So it reports races between lanes, warps and blocks.
///
/// Supports only what Tessera's kernels use: one-dimensional blocks, dynamic shared memory,
/// `__syncwarp` and `__shfl_xor_sync` of whole warps. Aborts if only some lanes of a warp call one
/// of these two. Not thread-safe: one thread launches and waits.
namespace cuda_on_cpu {

/// Puts work at the end of a stream.
void enqueue(cudaStream_t stream, std::function<void()> work);

/// Puts a launch at the end of a stream. If its configuration is invalid, does not launch; the next
/// `cudaGetLastError` then returns cudaErrorInvalidConfiguration.
void launch(unsigned num_blocks, unsigned num_threads, std::size_t shared_nbytes,
            cudaStream_t stream, std::function<void()> kernel);

/// Returns the dynamic shared memory of the block that runs. All numbers in it are NaN at first.
float* shared_floats();

enum class Meeting { sync, shuffle };

/// Waits until all lanes of the warp have called `meet`. `meeting`: which CUDA function calls it.
void meet(Meeting meeting, unsigned mask);

/// Waits until all lanes of the warp have called `exchange`. Returns the `given` of lane `source`.
float exchange(unsigned mask, float given, unsigned source);

}  // namespace cuda_on_cpu

inline uint3 threadIdx{}, blockIdx{};
inline dim3 blockDim{}, gridDim{};

#ifdef TESSERA_WITHOUT_SYNCWARP  // to show that ThreadSanitizer then reports races
inline void __syncwarp(unsigned = ~0U) {}
#else
inline void __syncwarp(unsigned mask = ~0U) {
  cuda_on_cpu::meet(cuda_on_cpu::Meeting::sync, mask);
}
#endif
inline float __shfl_xor_sync(unsigned mask, float given, int lane_mask) {
  return cuda_on_cpu::exchange(mask, given, threadIdx.x % 32 ^ static_cast<unsigned>(lane_mask));
}
