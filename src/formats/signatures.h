#pragma once

#include <algorithm>
#include <cstddef>
#include <string_view>

namespace tessera::formats::detail {

// The first bytes of files.
inline constexpr std::string_view kZipSignature("PK\x03\x04", 4);
inline constexpr std::string_view kHdf5Signature("\x89HDF\r\n\x1a\n", 8);
inline constexpr std::string_view kNativeSignature("\x89TSR\r\n\x1a\n", 8);

/// Whether a file that begins with `head` is HDF5: its signature is at byte 0, or at byte 512.
inline bool is_hdf5(std::string_view head) {
  return head.starts_with(kHdf5Signature) ||
         head.substr(std::min<std::size_t>(512, head.size())).starts_with(kHdf5Signature);
}

}  // namespace tessera::formats::detail
