#pragma once

#include <cstdint>

namespace tessera {

/// A half-open range of bytes `[begin, end)` within a file or buffer.
struct ByteRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;

  constexpr std::uint64_t nbytes() const { return end - begin; }
  constexpr bool empty() const { return begin == end; }
  friend constexpr bool operator==(const ByteRange&, const ByteRange&) = default;
};

}  // namespace tessera
