#pragma once

#include <cstdint>

namespace tessera::formats {

/// Data of at least this size begin at a page boundary of the file, so that they can be mapped into
/// memory, or written without the page cache. The gaps before them hold arbitrary bytes.
inline constexpr std::uint64_t kMinPagedNbytes = std::uint64_t{256} << 10;
inline constexpr std::uint64_t kPageNbytes = 4096;

/// Files of at least this size are written without the page cache. For smaller files this gains
/// nothing.
inline constexpr std::uint64_t kMinUncachedFileNbytes = std::uint64_t{8} << 20;

}  // namespace tessera::formats
