#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "embedding_kernels/bags.h"
#include "embedding_kernels/cuda/launch.cuh"

namespace tessera::embedding::cuda {

constexpr int kWarpThreads = 32;
constexpr int kBlockThreads = 256;
constexpr int kBlockWarps = kBlockThreads / kWarpThreads;
constexpr std::int64_t kMaxBlocks = 1 << 20;  // per launch; each thread loops

/// Returns the number of blocks of a launch in which each warp takes one of `num_items` items. The
/// number is at most kMaxBlocks: if there are more items, each warp takes several.
inline unsigned num_blocks_for(std::int64_t num_items, int warps_per_block = kBlockWarps) {
  const std::int64_t blocks = (num_items + warps_per_block - 1) / warps_per_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks < kMaxBlocks ? blocks : kMaxBlocks);
}

__device__ inline int lane() {
  return static_cast<int>(threadIdx.x) % kWarpThreads;
}
__device__ inline int warp_in_block() {
  return static_cast<int>(threadIdx.x) / kWarpThreads;
}
__device__ inline std::int64_t first_item() {
  return static_cast<std::int64_t>(blockIdx.x) * (blockDim.x / kWarpThreads) + warp_in_block();
}
__device__ inline std::int64_t num_warps() {
  return static_cast<std::int64_t>(gridDim.x) * (blockDim.x / kWarpThreads);
}

__device__ inline float to_float(float v) {
  return v;
}
__device__ inline float to_float(__half v) {
  return __half2float(v);
}
__device__ inline float to_float(__nv_bfloat16 v) {
  return __bfloat162float(v);
}
__device__ inline void store(float* to, float v) {
  *to = v;
}
__device__ inline void store(__half* to, float v) {
  *to = __float2half_rn(v);
}
__device__ inline void store(__nv_bfloat16* to, float v) {
  *to = __float2bfloat16_rn(v);
}

/// Calls `body` with the table's weights as a pointer to its element type.
template <class Body>
__device__ void with_weights(const TableView& table, const Body& body) {
  switch (table.dtype) {
    case DType::float16:
      return body(static_cast<__half*>(table.weights));
    case DType::bfloat16:
      return body(static_cast<__nv_bfloat16*>(table.weights));
    default:
      return body(static_cast<float*>(table.weights));
  }
}

/// Returns the sum over a warp, on all lanes.
__device__ inline float sum_over_warp(float v) {
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2) {
    v += __shfl_xor_sync(0xFFFFFFFFU, v, distance);
  }
  return v;
}

}  // namespace tessera::embedding::cuda
