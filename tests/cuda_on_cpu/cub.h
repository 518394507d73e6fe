#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "cuda_on_cpu/cuda_on_cpu.h"

// Replacements for the device-wide algorithms of cub that Tessera calls. As in cub, a call without
// a workspace only returns how large the workspace must be.
namespace cub {

inline bool asks_for_workspace(const void* workspace, std::size_t& nbytes) {
  if (workspace != nullptr) return false;
  nbytes = 1;
  return true;
}

struct DeviceRadixSort {
  template <class Key, class Value, class N>
  static cudaError_t SortPairs(void* workspace, std::size_t& nbytes, const Key* keys, Key* sorted,
                               const Value* values, Value* sorted_values, N numel, int begin_bit,
                               int end_bit, cudaStream_t stream) {
    if (asks_for_workspace(workspace, nbytes)) return cudaSuccess;
    cuda_on_cpu::enqueue(stream, [=] {
      const auto bits = [=](N i) {
        const bool is_whole = end_bit >= static_cast<int>(8 * sizeof(Key));
        return (is_whole ? keys[i] : keys[i] & ((Key{1} << end_bit) - 1)) >> begin_bit;
      };
      std::vector<N> order(static_cast<std::size_t>(numel));
      std::iota(order.begin(), order.end(), N{0});
      std::ranges::stable_sort(order, {}, bits);
      N place = 0;
      for (const N from : order) {
        sorted[place] = keys[from];
        sorted_values[place++] = values[from];
      }
    });
    return cudaSuccess;
  }
};

struct DeviceRunLengthEncode {
  template <class T, class Count>
  static cudaError_t Encode(void* workspace, std::size_t& nbytes, const T* elements, T* unique,
                            Count* counts, Count* num_runs, int numel, cudaStream_t stream) {
    if (asks_for_workspace(workspace, nbytes)) return cudaSuccess;
    cuda_on_cpu::enqueue(stream, [=] {
      Count runs = 0;
      for (int begin = 0, end = 0; begin < numel; begin = end) {
        while (end < numel && elements[end] == elements[begin]) ++end;
        unique[runs] = elements[begin];
        counts[runs++] = static_cast<Count>(end - begin);
      }
      *num_runs = runs;
    });
    return cudaSuccess;
  }
};

struct DeviceScan {
  template <class T, class N>
  static cudaError_t ExclusiveSum(void* workspace, std::size_t& nbytes, const T* elements, T* sums,
                                  N numel, cudaStream_t stream) {
    if (asks_for_workspace(workspace, nbytes)) return cudaSuccess;
    cuda_on_cpu::enqueue(stream,
                         [=] { std::exclusive_scan(elements, elements + numel, sums, T{}); });
    return cudaSuccess;
  }
};

}  // namespace cub
