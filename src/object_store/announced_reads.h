#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "object_store/read_ahead.h"
#include "tessera/base/error.h"

namespace tessera::object_store {

/// A set of bytes of a file. Not thread-safe.
class ByteSet {
 public:
  void add(ByteRange range);
  void remove(ByteRange range);
  /// Returns the parts of `range` that are not in the set, in ascending order.
  std::vector<ByteRange> missing(ByteRange range) const;

 private:
  std::map<std::uint64_t, std::uint64_t> ends_;  // by begin; the ranges do not touch each other
};

/// The bytes of one file that a job will read, in the order of the reads, and those of them that
/// were requested from the server. With it, nothing is read ahead that is not needed, and nothing
/// twice. Thread-safe.
class ReadList {
 public:
  /// Smaller gaps between two reads are read with them, because this is cheaper than a request.
  static constexpr std::uint64_t kMaxGapNbytes = std::uint64_t{16} << 10;

  explicit ReadList(const std::vector<ByteRange>& in_order);

  /// Whether this process made the list. The lock of a parent's list may stay locked in a child.
  bool is_of_this_process() const { return process_ == ::getpid(); }

  void note_requested(ByteRange range);
  /// Says that requested bytes are no longer in memory, although not all of them were read. If the
  /// job reads much of the file several times, such as for the pieces of each rank, these are
  /// requested again, ahead of the next time.
  void note_dropped(ByteRange range);
  /// Returns the next bytes to read ahead for a read of `read`: those that the job will read next
  /// and that were not requested yet; also those of the read itself, if they and some around them
  /// can share a request. Empty if `read` begins outside of the list.
  std::vector<ByteRange> next_after(ByteRange read, const ReadAheadSizes& sizes) const;

 private:
  std::optional<std::size_t> run_with(std::uint64_t offset) const;
  ByteRange with_neighbours(std::size_t run) const;

  const pid_t process_ = ::getpid();
  mutable std::mutex mutex_;
  std::vector<ByteRange> runs_;        // in the order of the reads
  std::vector<std::size_t> by_begin_;  // indices into runs_
  std::vector<std::size_t> places_;    // of each run in by_begin_
  bool is_read_again_ = false;         // many bytes are read several times, or lie between others
  ByteSet requested_;
};

/// Announces to the files at URLs what a job is going to read. It ends with this object. If two
/// jobs read one file at the same time, the later announcement counts.
class AnnouncedReads {
 public:
  AnnouncedReads() = default;
  /// `by_url`: for each file, the ranges in the order of the reads.
  explicit AnnouncedReads(const std::map<std::string, std::vector<ByteRange>>& by_url);
  ~AnnouncedReads();
  AnnouncedReads(const AnnouncedReads&) = delete;
  AnnouncedReads& operator=(const AnnouncedReads&) = delete;

  /// Returns what was announced for a file; null if nothing was.
  static std::shared_ptr<ReadList> of(const std::string& url);

 private:
  std::map<std::string, std::shared_ptr<ReadList>> lists_;  // by URL
};

}  // namespace tessera::object_store
