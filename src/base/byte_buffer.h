#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <span>

namespace tessera::detail {

/// Memory that is used again and again, and is not filled with zeros in between. Begins with a
/// page, so that a file written past the page cache takes it as it is.
class ByteBuffer {
  static constexpr std::align_val_t kAlignment{4096};

  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
  };

 public:
  /// Returns `nbytes` of it, with any content. What was returned before is gone.
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
