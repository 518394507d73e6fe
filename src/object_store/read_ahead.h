#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::object_store {

/// Sizes of requests. The delays of a store (some 10 to 100 ms) weigh as much as some megabytes.
struct ReadAheadSizes {
  std::uint64_t small_nbytes = std::uint64_t{1} << 20;   // reads below come out of a window
  std::uint64_t whole_nbytes = std::uint64_t{4} << 20;   // files up to this size are one window
  std::uint64_t first_nbytes = std::uint64_t{64} << 10;  // of the first window of a larger file
  std::uint64_t window_nbytes = std::uint64_t{8} << 20;  // of later ones, and of parts of reads
  std::uint64_t split_nbytes = std::uint64_t{16} << 20;  // larger reads are several requests
  std::uint64_t ahead_nbytes = std::uint64_t{64} << 20;  // at most, before a stream of reads
  std::uint64_t begin_ahead_nbytes = std::uint64_t{2} << 20;  // a stream is read ahead after this
};

/// Finds streams in the reads of one file, and says how far ahead of them to read. Not thread-safe.
class StreamFinder {
 public:
  explicit StreamFinder(ReadAheadSizes sizes) : sizes_(sizes) {}

  /// Notes a read. If it continues a stream, returns the bytes to read ahead of it that are not
  /// read ahead yet; they may be none.
  std::optional<ByteRange> note(ByteRange read, std::uint64_t file_nbytes);

 private:
  struct Stream {
    std::uint64_t first = 0;      // where it began
    std::uint64_t next = 0;       // where its last read ended
    std::uint64_t ahead_end = 0;  // what is read ahead
    std::uint64_t age = 0;
  };

  ReadAheadSizes sizes_;
  std::vector<Stream> streams_;
  std::uint64_t age_ = 0;
};

/// Returns a range in parts of at most `part_nbytes`.
std::vector<ByteRange> in_parts(ByteRange range, std::uint64_t part_nbytes);

}  // namespace tessera::object_store
