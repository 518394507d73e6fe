#pragma once

#include <cstdint>

namespace tessera::formats {

/// In DCP files and torch.save archives, data of at least this size begin at a page of the file, so
/// that they can be memory-mapped, or written without the page cache. Readers skip the gaps.
inline constexpr std::uint64_t kMinPagedNbytes = std::uint64_t{256} << 10;
inline constexpr std::uint64_t kPageNbytes = 4096;

/// DCP files and torch.save archives of at least this size are written without the page cache. For
/// smaller files that gains nothing. (Native rank files: from 16 MiB of data on.)
inline constexpr std::uint64_t kMinUncachedFileNbytes = std::uint64_t{8} << 20;

}  // namespace tessera::formats
