#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <span>

namespace tessera::detail {

/// Memory that is used again and again, and never zeroed. It is page-aligned, so that writes that
/// bypass the page cache need no copy.
class ByteBuffer {
  static constexpr std::align_val_t kAlignment{4096};

  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
  };

 public:
  /// Returns `nbytes` bytes of the buffer, with any content. Invalidates the previous result.
  std::span<std::byte> take(std::size_t nbytes) {
    if (nbytes > nbytes_) {
      memory_.reset();
      nbytes_ = 0;
      memory_.reset(static_cast<std::byte*>(::operator new(nbytes, kAlignment)));
      nbytes_ = nbytes;
    }
    return {memory_.get(), nbytes};
  }

 private:
  std::unique_ptr<std::byte, Free> memory_;
  std::size_t nbytes_ = 0;
};

}  // namespace tessera::detail
