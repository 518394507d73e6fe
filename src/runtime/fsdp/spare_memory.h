#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace tessera::fsdp {

/// Keeps the memory of unsharded parameters and gradients that units have freed, and gives it to
/// units that need the same size or up to one eighth less. The CPU allocator would return such
/// large blocks to the operating system, and fresh pages take a tenth of a step's time. Before
/// `allocate` takes new memory, it releases at least as many bytes of kept memory, or all of it. So
/// the kept memory adds nothing to the peak. On other devices, `free` releases the memory at once,
/// because their allocators cache. Not thread-safe.
class SpareMemory {
 public:
  /// Gives memory to a tensor that has none.
  void allocate(const at::Tensor& tensor);
  /// Takes the memory of `tensor` and keeps it for the next `allocate`. Requires: no other tensor
  /// will use that memory.
  void free(const at::Tensor& tensor);
  /// Releases all kept memory.
  void release() { blocks_.clear(); }

 private:
  struct Block {
    c10::DataPtr data;
    std::size_t nbytes;
  };

  std::vector<Block> blocks_;
};

}  // namespace tessera::fsdp
