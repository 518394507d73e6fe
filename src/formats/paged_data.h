#pragma once

#include <cstdint>

namespace tessera::formats {

/// Data of this size and more begin at a page of the file, so that they can be written (and mapped)
/// without the page cache's help; what lies between then says nothing.
inline constexpr std::uint64_t kMinPagedNbytes = std::uint64_t{256} << 10;
inline constexpr std::uint64_t kPageNbytes = 4096;

/// Smaller files are not worth going past the page cache.
inline constexpr std::uint64_t kMinUncachedFileNbytes = std::uint64_t{8} << 20;

}  // namespace tessera::formats
