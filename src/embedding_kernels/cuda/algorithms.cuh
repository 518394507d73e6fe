#pragma once

#ifdef __CUDACC__
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_run_length_encode.cuh>
#include <cub/device/device_scan.cuh>
#else
#include "cuda_on_cpu/cub.h"  // in tests/: runs on the CPU
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "embedding_kernels/cuda/device_memory.h"

// Algorithms over whole arrays in device memory, with cub.
namespace tessera::embedding::cuda {

/// Calls a cub algorithm twice: first to get the size of its workspace, then to run.
template <class Algorithm>
void with_workspace(cudaStream_t stream, const char* what, const Algorithm& algorithm) {
  std::size_t nbytes = 0;
  check(algorithm(nullptr, nbytes), what);
  const DeviceArray<std::byte> workspace(
      static_cast<std::int64_t>(std::max<std::size_t>(nbytes, 1)), stream);
  check(algorithm(static_cast<void*>(workspace.data()), nbytes), what);
}

/// Sorts pairs by bits [0, num_bits) of their keys. Equal keys stay in order.
template <class Key, class Value>
void sort_pairs(const Key* keys, Key* sorted_keys, const Value* values, Value* sorted_values,
                std::int64_t numel, int num_bits, cudaStream_t stream) {
  with_workspace(stream, "sort", [&](void* workspace, std::size_t& nbytes) {
    return cub::DeviceRadixSort::SortPairs(workspace, nbytes, keys, sorted_keys, values,
                                           sorted_values, numel, 0, num_bits, stream);
  });
}

/// Writes the element of each run of equal elements to `unique`, its length to `counts`, and the
/// number of runs to `num_runs`. `numel` is an int because cub takes an int, even in CUDA 13.0.
template <class T, class Count>
void run_lengths(const T* elements, T* unique, Count* counts, Count* num_runs, int numel,
                 cudaStream_t stream) {
  with_workspace(stream, "group", [&](void* workspace, std::size_t& nbytes) {
    return cub::DeviceRunLengthEncode::Encode(workspace, nbytes, elements, unique, counts, num_runs,
                                              numel, stream);
  });
}

/// Sets `sums[i]` to the sum of all elements before element `i`.
template <class T>
void exclusive_sums(const T* elements, T* sums, std::int64_t numel, cudaStream_t stream) {
  with_workspace(stream, "sum", [&](void* workspace, std::size_t& nbytes) {
    return cub::DeviceScan::ExclusiveSum(workspace, nbytes, elements, sums, numel, stream);
  });
}

}  // namespace tessera::embedding::cuda
