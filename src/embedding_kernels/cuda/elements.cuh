#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
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

/// Four columns of a row that follow each other. A lane reads and writes them at once.
constexpr int kColumnsAtOnce = 4;
struct Four {
  float v[kColumnsAtOnce];
};

/// All functions on four columns require that the pointer is aligned to four elements.
__device__ inline Four load_four(const float* from) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  return {four.x, four.y, four.z, four.w};
}
template <class Half>
struct alignas(kColumnsAtOnce * sizeof(Half)) FourHalves {
  Half v[kColumnsAtOnce];
};
template <class Half>
__device__ Four load_four(const Half* from) {
  const FourHalves<Half> halves = *reinterpret_cast<const FourHalves<Half>*>(from);
  return {to_float(halves.v[0]), to_float(halves.v[1]), to_float(halves.v[2]),
          to_float(halves.v[3])};
}
__device__ inline void store_four(float* to, const Four& four) {
  *reinterpret_cast<float4*>(to) = {four.v[0], four.v[1], four.v[2], four.v[3]};
}
template <class Half>
__device__ void store_four(Half* to, const Four& four) {
  FourHalves<Half> halves;
  for (int i = 0; i < kColumnsAtOnce; ++i) store(halves.v + i, four.v[i]);
  *reinterpret_cast<FourHalves<Half>*>(to) = halves;
}

/// Returns whether the first four elements of an array can be read at once.
inline bool is_aligned_to_four(const void* array, std::size_t element_nbytes = sizeof(float)) {
  return reinterpret_cast<std::uintptr_t>(array) % (kColumnsAtOnce * element_nbytes) == 0;
}
inline bool has_rows_aligned_to_four(const TableView& table) {
  return table.dim % kColumnsAtOnce == 0 &&
         is_aligned_to_four(table.weights, table.dtype == DType::float32 ? 4 : 2);
}

/// Returns whether each feature begins at a multiple of four columns of the pooled output.
inline bool are_features_aligned_to_four(const Bags& bags) {
  return std::ranges::all_of(bags.column_of_feature,
                             [](std::int64_t column) { return column % kColumnsAtOnce == 0; });
}

/// Returns how many lanes share a row of `dim` columns if each takes four columns: a power of two.
inline int num_lanes_for(std::int64_t dim) {
  int lanes = 1;
  while (lanes < kWarpThreads && lanes * kColumnsAtOnce < dim) lanes *= 2;
  return lanes;
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

/// Returns four elements of a table's weights, from the index `i` on.
__device__ inline Four load_weights(const TableView& table, std::int64_t i) {
  Four four;
  with_weights(table, [&](const auto* weights) { four = load_four(weights + i); });
  return four;
}
__device__ inline void store_weights(const TableView& table, std::int64_t i, const Four& four) {
  with_weights(table, [&](auto* weights) { store_four(weights + i, four); });
}

/// Returns the sum of `v` over this lane's group of `num_lanes` lanes. Every lane of the group gets
/// this sum. All lanes of the warp must call this function together.
__device__ inline float sum_over_lanes(float v, int num_lanes = kWarpThreads) {
  for (int distance = num_lanes / 2; distance > 0; distance /= 2) {
    v += __shfl_xor_sync(0xFFFFFFFFU, v, distance);
  }
  return v;
}

}  // namespace tessera::embedding::cuda
