#pragma once

#include <ATen/core/Tensor.h>

namespace tessera::fsdp {

/// Keeps the memory that one unit has freed, and gives it to the next unit if that unit needs the
/// same size or up to one eighth less. The CPU allocator would return such large blocks to the
/// operating system, and fresh pages cost a tenth of a training step. Holds one such block, from
/// `free` until the next `allocate` or `release`, so it never adds to the peak memory. On other
/// devices, `free` releases the memory at once, because their allocators cache. Not thread-safe.
class SpareMemory {
 public:
  /// Gives memory to a tensor that has none.
  void allocate(const at::Tensor& tensor);
  /// Takes the memory of `tensor` and keeps it for the next `allocate`. Requires: no other tensor
  /// will use that memory.
  void free(const at::Tensor& tensor);
  void release();

 private:
  c10::DataPtr spare_;
  std::size_t nbytes_ = 0;
};

/// The spare memory of one pass.
struct PassMemory {
  SpareMemory parameters;  // memory of unsharded flat parameters
  SpareMemory gradients;   // memory of unsharded gradients
  void release() {
    parameters.release();
    gradients.release();
  }
};

}  // namespace tessera::fsdp
