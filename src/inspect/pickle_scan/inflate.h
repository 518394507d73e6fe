#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "tessera/base/file_system.h"

namespace tessera::inspect {

/// The result of inflating compressed bytes.
struct Inflated {
  std::string bytes{};
  bool is_whole = false;    // false: damaged, cut short, or more than a limit
  bool is_limited = false;  // true: `bytes` ends where a limit (bytes, gzip members) was reached
};

/// The scan inflates at most this many members of one gzip file.
inline constexpr std::size_t kMaxGzipMembers = 100'000;

/// How the compressed bytes are wrapped.
enum class Wrapping {
  none,          // as in zip archives
  zlib_or_gzip,  // gzip: one member or several, with zero bytes between them or not
};

/// Inflates the bytes of `file`, but not to more than `max_nbytes`. If the bytes are damaged,
/// returns the content before the first error. Throws: Error(io).
Inflated inflate_file(const ReadableFile& file, Wrapping wrapping, std::uint64_t max_nbytes);

}  // namespace tessera::inspect
