#pragma once

#include <cstddef>
#include <memory>
#include <span>

namespace tessera::detail {

/// Memory that is used again and again, and is not filled with zeros in between.
class ByteBuffer {
 public:
  /// Returns `nbytes` of it, with any content. What was returned before is gone.
  std::span<std::byte> take(std::size_t nbytes) {
    if (nbytes > nbytes_) {
      memory_.reset();
      memory_ = std::make_unique_for_overwrite<std::byte[]>(nbytes);
      nbytes_ = nbytes;
    }
    return {memory_.get(), nbytes};
  }

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::size_t nbytes_ = 0;
};

}  // namespace tessera::detail
