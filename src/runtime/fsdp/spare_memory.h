#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::fsdp {

/// Keeps the memory that a unit has freed for the one that needs as much next. The CPU's allocator
/// returns blocks of that size to the operating system, and pages that are fresh again cost a tenth
/// of a training step. Holds one block, from the time when it is freed to the next request or to
/// `release`: so there is never more memory than there was before it was freed. Does nothing on
/// other devices, whose allocators keep what they have. Not thread-safe.
class SpareMemory {
 public:
  /// Gives a tensor without memory the memory for its elements.
  void allocate(const at::Tensor& tensor);
  /// Takes a tensor's memory away. Requires: no other tensor is to use it.
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
