#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstddef>
#include <functional>

/// Runs kernels of CUDA C++ on the processor, for tests. The compiler of the processor compiles a
/// kernel as a function. Each lane is a fiber: it runs until it meets the other lanes of its warp,
/// and which lane runs next is drawn from TESSERA_TEST_SEED. Streams are queues that run when
/// somebody waits for them. AddressSanitizer sees each allocation of device memory.
/// ThreadSanitizer sees each lane as a thread: only meetings of a warp, and the begin and the end
/// of a launch, put accesses in order. So it reports races between lanes, warps and blocks.
///
/// Knows what Tessera's kernels use, of CUDA's own declarations, and no more: one-dimensional
/// blocks, dynamic shared memory, `__syncwarp` and `__shfl_xor_sync` of whole warps. Aborts where
/// only some lanes of a warp meet. Not thread-safe: one thread launches and waits.
namespace cuda_on_cpu {

/// Puts work at the end of a stream.
void enqueue(cudaStream_t stream, std::function<void()> work);

/// Puts a launch at the end of a stream. An error of its configuration is what `cudaGetLastError`
/// returns next.
void launch(unsigned num_blocks, unsigned num_threads, std::size_t shared_nbytes,
            cudaStream_t stream, std::function<void()> kernel);

/// Returns the dynamic shared memory of the block that runs. Its bytes begin as 0xFF.
float* shared_floats();

enum class Meeting { sync, shuffle };

/// Waits until all lanes of the warp are here.
void meet(Meeting meeting, unsigned mask);

/// Returns what lane `source` of the warp gives at this meeting.
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
