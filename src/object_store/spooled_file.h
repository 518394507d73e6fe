#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/file_descriptor.h"
#include "object_store/md5.h"
#include "object_store/s3_uploads.h"
#include "tessera/base/error.h"

namespace tessera::object_store {

/// The sizes of an upload's parts.
///
/// S3 takes at most 10,000 parts, of 5 MiB to 5 GiB each; only the last one may be smaller. R2
/// wants all others to be of one size.
struct PartSizes {
  static constexpr std::uint64_t kMinNbytes = std::uint64_t{16} << 20;
  static constexpr std::uint64_t kMaxParts = 10'000;

  /// Returns the size of the parts of a file: 16 MiB, or more MiB for a file of over 156 GiB.
  static std::uint64_t of_file(std::uint64_t nbytes, std::uint64_t min_nbytes = kMinNbytes);
};

/// The ranges of a file that have been written, merged where they meet.
class WrittenRanges {
 public:
  void add(ByteRange range);
  bool covers(ByteRange range) const;

 private:
  std::map<std::uint64_t, std::uint64_t> ends_;  // by begin
};

/// A file that is written on the local disk and uploaded part by part. Knows which parts are
/// complete, and which of them the server has. Thread-safe.
///
/// A part is complete once all of its bytes have been written, or the file was synced. The first
/// part is uploaded last, because some formats write their header last. A part that is written
/// again after its upload is uploaded again. The disk gives back the bytes of an uploaded part once
/// nothing reads or writes them again: after the sync, or at once if the format writes each byte
/// only once.
class SpooledFile {
 public:
  /// When the bytes of an uploaded part are given back.
  enum class Release { after_upload, after_sync };
  /// A part to upload.
  struct Work {
    int index = 0;                 // from 0
    ByteRange range;               // of the file
    std::uint64_t generation = 0;  // for `note_uploaded`
  };

  /// Takes an empty local file at `path`.
  SpooledFile(std::string path, std::string url, std::uint64_t min_part_nbytes, Release release);

  const std::string& path() const { return path_; }
  const std::string& url() const { return url_; }
  std::uint64_t nbytes() const;
  /// Whether the whole file fits in one part, and so in one request.
  bool is_one_part() const;

  /// Returns the open local file. Users share one descriptor, which the last of them closes.
  std::shared_ptr<const tessera::detail::FileDescriptor> open() const;
  /// Writes on the disk. Returns the parts that this makes complete, apart from the first one.
  std::vector<Work> write_at(std::uint64_t offset, std::span<const std::byte> bytes);
  void resize(std::uint64_t nbytes);
  /// Takes all bytes as final, also those that were never written, which are zero. Returns the
  /// parts that are complete now, apart from the first one.
  std::vector<Work> sync();
  /// Returns the first part, and all others that the server does not have. Requires: synced.
  std::vector<Work> rest();
  std::vector<std::byte> read(ByteRange range) const;

  /// Records an uploaded part, unless it was written again meanwhile.
  void note_uploaded(const Work& work, UploadedPart part);
  /// Returns all parts. Requires: all are uploaded.
  std::vector<UploadedPart> uploaded_parts() const;

  /// The upload in parts. `begin_mutex` is held while it is begun.
  std::mutex begin_mutex;
  std::string upload_id{};             // empty: not begun
  std::map<int, UploadedPart> kept{};  // of an interrupted run, by number

 private:
  enum class State { open, taken, uploaded };
  struct Part {
    State state = State::open;
    std::uint64_t generation = 0;  // counts the writes after it was taken
    bool is_released = false;
    UploadedPart uploaded{};
  };

  ByteRange range_of(std::size_t part) const;
  void touch(ByteRange range);
  void fix_part_nbytes();
  void release(std::size_t part);
  std::vector<Work> take(std::size_t begin, std::size_t end);

  const std::string path_;
  const std::string url_;
  const std::uint64_t min_part_nbytes_;
  const Release release_;
  mutable std::mutex open_mutex_;
  mutable std::weak_ptr<const tessera::detail::FileDescriptor> open_;
  mutable std::mutex mutex_;  // guards all below
  std::uint64_t nbytes_ = 0;
  std::uint64_t part_nbytes_ = 0;  // 0: not fixed yet
  bool is_synced_ = false;
  WrittenRanges written_;
  std::vector<Part> parts_;
};

}  // namespace tessera::object_store
