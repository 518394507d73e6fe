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

/// Sizes of requests to a store. One request takes 10 to 100 ms, as long as the transfer of some
/// megabytes.
struct ReadAheadSizes {
  std::uint64_t small_nbytes = std::uint64_t{1} << 20;   // a smaller read is served from a window
  std::uint64_t whole_nbytes = std::uint64_t{4} << 20;   // smaller files are read to their end
  std::uint64_t first_nbytes = std::uint64_t{64} << 10;  // of a window, if the file is larger
  std::uint64_t window_nbytes = std::uint64_t{8}
                                << 20;  // of windows read ahead, and of the parts of large reads
  std::uint64_t split_nbytes = std::uint64_t{16}
                               << 20;  // larger reads are sent as several requests
  std::uint64_t ahead_nbytes = std::uint64_t{64} << 20;  // the most that is read ahead of a stream
  std::uint64_t begin_ahead_nbytes = std::uint64_t{2}
                                     << 20;  // read-ahead begins after a stream has this size
};

/// Finds streams (reads of adjacent ranges, in about this order) among the reads of one file, and
/// decides how far to read ahead. Not thread-safe.
class StreamFinder {
 public:
  explicit StreamFinder(ReadAheadSizes sizes) : sizes_(sizes) {}

  /// Records a read. If the read continues a stream, returns the next range to read ahead, which
  /// may be empty. Returns nothing if the read begins a new stream.
  std::optional<ByteRange> note(ByteRange read, std::uint64_t file_nbytes);

 private:
  struct Stream {
    std::uint64_t first = 0;      // where the stream began
    std::uint64_t next = 0;       // the greatest end of its reads
    std::uint64_t ahead_end = 0;  // the end of the bytes that were read ahead
    std::uint64_t age = 0;
  };

  ReadAheadSizes sizes_;
  std::vector<Stream> streams_;
  std::uint64_t age_ = 0;
};

/// Cuts a range into parts of at most `part_nbytes`.
std::vector<ByteRange> in_parts(ByteRange range, std::uint64_t part_nbytes);

}  // namespace tessera::object_store
