#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <string>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::embedding::cuda {

inline void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Error(ErrorKind::io, {}, std::string("CUDA: ") + what + ": " + cudaGetErrorString(status));
}

/// Allocates and frees device memory in the order of a stream. `allocate` throws if there is no
/// memory; `free` must not throw.
struct DeviceAllocator {
  void* (*allocate)(std::size_t nbytes, cudaStream_t stream);
  void (*free)(void* memory, cudaStream_t stream);
};

/// CUDA's own pool. It gives all its free memory back to the system whenever the host waits for a
/// stream, so the next allocations are slow.
inline constexpr DeviceAllocator kCudaPool = {
    .allocate =
        [](std::size_t nbytes, cudaStream_t stream) {
          void* memory = nullptr;
          check(cudaMallocAsync(&memory, nbytes, stream), "allocate");
          return memory;
        },
    .free = [](void* memory, cudaStream_t stream) { cudaFreeAsync(memory, stream); }};

/// The allocator of every DeviceArray. Set it before the first one is made.
inline DeviceAllocator device_allocator = kCudaPool;

/// Owns an array in device memory, which is allocated and freed in stream order.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(std::int64_t numel, cudaStream_t stream) : numel_(numel), stream_(stream) {
    if (numel == 0) return;
    data_ = static_cast<T*>(device_allocator.allocate(nbytes(), stream));
  }
  DeviceArray(std::span<const T> values, cudaStream_t stream)
      : DeviceArray(static_cast<std::int64_t>(values.size()), stream) {
    if (values.empty()) return;
    check(cudaMemcpyAsync(data_, values.data(), nbytes(), cudaMemcpyHostToDevice, stream), "copy");
  }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), numel_(other.numel_), stream_(other.stream_) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(numel_, other.numel_);
    std::swap(stream_, other.stream_);
    return *this;
  }
  ~DeviceArray() {
    if (data_ != nullptr) device_allocator.free(data_, stream_);
  }

  T* data() const { return data_; }
  std::int64_t numel() const { return numel_; }
  std::size_t nbytes() const { return static_cast<std::size_t>(numel_) * sizeof(T); }

  void fill_with_zeros() {
    if (data_ != nullptr) check(cudaMemsetAsync(data_, 0, nbytes(), stream_), "set to zero");
  }

 private:
  T* data_ = nullptr;
  std::int64_t numel_ = 0;
  cudaStream_t stream_ = nullptr;
};

}  // namespace tessera::embedding::cuda
