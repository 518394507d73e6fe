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
#include "object_store/upload_parts.h"
#include "tessera/base/error.h"

namespace tessera::object_store {

/// The sizes of an upload's parts (a part is a range of a file that one request sends).
///
/// S3 accepts at most 10,000 parts of 5 MiB to 5 GiB each; only the last part may be smaller. R2
/// requires that all parts except the last have the same size.
struct PartSizes {
  static constexpr std::uint64_t kMinNbytes = std::uint64_t{8} << 20;
  /// For a file whose size is not known when its upload begins, so that it can grow to 156 GiB.
  static constexpr std::uint64_t kMinNbytesOfGrowing = std::uint64_t{16} << 20;
  static constexpr std::uint64_t kMaxParts = 10'000;

  /// Returns the size of a file's parts: `min_nbytes`, or more if that gives over 10,000 parts.
  static std::uint64_t of_file(std::uint64_t nbytes, std::uint64_t min_nbytes = kMinNbytes);
};

/// The ranges of a file that have been written. Adjacent ranges are merged.
class WrittenRanges {
 public:
  void add(ByteRange range);
  bool covers(ByteRange range) const;

 private:
  std::map<std::uint64_t, std::uint64_t> ends_;  // key: begin of a range; value: its end
};

/// A file that is written on the local disk and uploaded part by part. Knows which parts are
/// complete, and which of them the server has. Thread-safe.
///
/// A part is complete once all of its bytes have been written, or the file was synced. The first
/// part is uploaded last, because some formats write their header last. A part that is written
/// again after its upload is uploaded again, but not before the earlier upload has ended: the
/// server keeps the bytes that arrive last. The disk space of an uploaded part (not of the first)
/// is freed when the part is no longer read or written: after the sync, or immediately if the
/// format writes each byte only once.
class SpooledFile {
 public:
  /// When the disk space of an uploaded part is freed.
  enum class Release { after_upload, after_sync };
  /// A part to upload.
  struct Work {
    int index = 0;                 // from 0
    ByteRange range;               // of the file
    std::uint64_t generation = 0;  // which version of the part's bytes; `note_uploaded` checks it
  };

  /// Requires: there is an empty local file at `path`.
  SpooledFile(std::string path, std::string url, std::uint64_t min_part_nbytes, Release release);

  const std::string& path() const { return path_; }
  const std::string& url() const { return url_; }
  std::uint64_t nbytes() const;
  /// Whether the whole file fits into one part, and can be uploaded in one request.
  bool is_one_part() const;

  /// Opens the local file. All callers share one descriptor; the last caller that drops it closes
  /// it.
  std::shared_ptr<const tessera::detail::FileDescriptor> open() const;
  /// Writes to the disk. Returns the parts that can be uploaded: complete ones that were not
  /// returned before. The first part is never among them; it is uploaded last.
  std::vector<Work> write_at(std::uint64_t offset, std::span<const std::byte> bytes);
  void resize(std::uint64_t nbytes);
  /// Declares all bytes final; bytes that were never written are zero. Returns the parts that can
  /// be uploaded, as write_at does.
  std::vector<Work> sync();
  /// Returns the first part, and all parts that were never returned, or were written again since.
  /// Requires: `sync` was called, and all uploads have ended.
  std::vector<Work> rest();
  std::vector<std::byte> read(ByteRange range) const;

  /// Call it after each successful upload. If a writer has changed the part since this object
  /// returned `work`, the part does not count as uploaded: `sync` or `rest` returns it again.
  void note_uploaded(const Work& work, UploadedPart part);
  /// Returns all parts. Requires: all are uploaded.
  std::vector<UploadedPart> uploaded_parts() const;

  /// Lock this mutex while you begin the upload in parts.
  std::mutex begin_mutex;
  MultipartUpload upload{};
  std::map<int, UploadedPart> kept{};  // key: number; parts that an interrupted run has uploaded

 private:
  enum class State { open, taken, uploaded };
  struct Part {
    State state = State::open;
    std::uint64_t generation = 0;  // counts the writes after the part was taken
    bool is_uploading = false;     // taken, perhaps of an earlier generation, and not noted yet
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
  std::uint64_t part_nbytes_ = 0;  // 0: not set yet
  bool is_synced_ = false;
  WrittenRanges written_;
  std::vector<Part> parts_;
};

}  // namespace tessera::object_store
