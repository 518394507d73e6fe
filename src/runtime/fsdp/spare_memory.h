#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::fsdp {

/// Keeps the memory that one unit frees for the next unit of about the same size. The CPU allocator
/// returns blocks of that size to the operating system, and fresh pages cost a tenth of a training
/// step. Holds one such block, from `free` until the next `allocate` or `release`, so it never adds
/// to the peak memory. Does nothing on other devices, whose allocators cache. Not thread-safe.
class SpareMemory {
 public:
  /// Allocates memory for a tensor without memory.
  void allocate(const at::Tensor& tensor);
  /// Takes a tensor's memory. Requires: no other tensor will use it.
  void free(const at::Tensor& tensor);
  void release();

 private:
  c10::DataPtr spare_;
  std::size_t nbytes_ = 0;
};

/// The spare memory of one pass.
struct PassMemory {
  SpareMemory parameters;  // of unsharded flat parameters
  SpareMemory gradients;   // of unsharded gradients
  void release() {
    parameters.release();
    gradients.release();
  }
};

}  // namespace tessera::fsdp
