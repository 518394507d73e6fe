#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/cuda.h>

#include "device.h"
#include "tessera/runtime/dist/launch.h"
#include "tessera/runtime/dist/mesh.h"
#ifdef TESSERA_HAS_CUDA_TABLES
#include "tessera/runtime/embedding/shard.h"
#endif

namespace tessera::bench {

dist::Mesh connect() {
#ifdef TESSERA_HAS_CUDA_TABLES
  embedding::use_cuda_kernels();
#endif
  return dist::init_from_env({.transport = dist::nccl()});
}

at::Device device() {
  return {at::kCUDA, c10::cuda::current_device()};
}

void wait_for_device() {
  torch::cuda::synchronize(c10::cuda::current_device());
}

std::int64_t peak_nbytes() {
  return c10::cuda::CUDACachingAllocator::getDeviceStats(c10::cuda::current_device())
      .allocated_bytes[0]
      .peak;
}

}  // namespace tessera::bench
