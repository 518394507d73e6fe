#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/forwarding_file_system.h"
#include "object_store/s3_uploads.h"
#include "object_store/spooled_file.h"
#include "object_store/stored_objects.h"
#include "object_store/upload_workers.h"
#include "tessera/base/file_system.h"

namespace tessera::object_store {

/// How a checkpoint is uploaded.
struct SpoolOptions {
  std::string url;             // of the destination
  std::string staging_suffix;  // writers work at the local path plus this suffix
  /// The objects at the URL that are to be replaced. If not set, the upload fails if an object with
  /// other bytes exists there.
  std::optional<StoredObjects> replaced{};  // without the mark of an incomplete checkpoint
  bool is_marked = false;                   // whether that mark is at the URL
  /// Returns whether a file, given by its path relative to the destination, is an index. Without
  /// its index, a checkpoint cannot be read. Index files are removed first and uploaded last.
  std::function<bool(const std::string& name)> is_index{};
  /// Returns whether a file is of a format whose files cannot be read without their index. Old
  /// files of such a format may stay until new files replace them. Spool removes all other old
  /// files before the new files appear.
  std::function<bool(const std::string& name)> needs_index{};
  /// Returns whether a file that is not an index may belong to a complete checkpoint without one.
  /// The mark of an incomplete checkpoint is there as long as such files appear.
  std::function<bool(const std::string& name)> may_be_whole_without_index{};
  SpooledFile::Release release = SpooledFile::Release::after_sync;
  bool resumes = false;   // use the parts that an interrupted run has uploaded
  bool discards = false;  // remove the parts that an interrupted run has uploaded
  std::uint64_t min_part_nbytes = PartSizes::kMinNbytes;
};

/// What the server keeps of an upload that was interrupted.
struct LeftOnServer {
  std::size_t num_objects = 0;          // objects that have appeared at the URL
  std::uint64_t unfinished_nbytes = 0;  // of uploaded parts, which readers do not see
  bool has_begun_to_replace = false;    // the old checkpoint is no longer complete
};

/// The local folder in which a checkpoint is written before it is at a URL (the spool).
///
/// A writer uses it like a local file system: it stages a checkpoint at `<path()><suffix>`, then
/// renames that to `path()`. While the files are written, they are uploaded in parts, and readers
/// do not see these uploads. The rename completes the uploads, the index last. Meanwhile, if files
/// can be read without an index, or if old objects are removed, an object (kIncompleteMark) tells
/// readers that the checkpoint is not complete. After the rename, the checkpoint is at the URL, and
/// the local folder is empty.
///
/// If the process dies earlier, the server keeps the uploaded parts. A run with
/// SpoolOptions::resumes uses them: a part that the server has with the same MD5 is not sent again.
/// Thread-safe like a FileSystem.
class Spool final : public ForwardingFileSystem {
 public:
  /// Creates `folder` if it does not exist. Throws: Error(already_exists) if an interrupted run has
  /// left uploads and the options neither resume nor discard them; Error(io).
  Spool(std::string folder, SpoolOptions options);
  /// Removes the local folder if it is empty.
  ~Spool() override;

  /// Returns the local path of the destination.
  const std::string& path() const { return path_; }
  /// Ends the unfinished uploads, and removes their parts from the server. Throws: Error(io).
  void abort();
  /// Ends the uploads, and leaves the uploaded parts on the server for a run that resumes.
  LeftOnServer keep();

  std::unique_ptr<ReadableFile> open(const std::string& path) const override;
  std::unique_ptr<WritableFile> create(const std::string& path) override;
  std::unique_ptr<WritableFile> open_for_update(const std::string& path) override;
  void rename(const std::string& from, const std::string& to) override;
  void remove_all(const std::string& path) override;

 private:
  class File;
  struct Begun {
    std::string url;
    std::uint64_t nbytes = 0;  // of the uploaded parts
  };
  using FilePointer = std::shared_ptr<SpooledFile>;

  bool is_staged(const std::string& path) const;
  std::string url_of(const std::string& staged_path) const;
  FilePointer spooled(const std::string& path);
  void upload(const FilePointer& file, std::vector<SpooledFile::Work> work);
  void upload_part(SpooledFile& file, const SpooledFile::Work& work);
  void begin_upload(SpooledFile& file);
  void publish(const std::string& staging_path, const std::string& path);
  void publish_file(SpooledFile& file);
  std::vector<FilePointer> in_order_of_publication(const std::string& staging_path) const;
  bool begin_note(const std::string& url);
  void claim();
  bool may_be_whole_without_index(const std::vector<FilePointer>& files) const;
  bool needs_mark(const std::vector<FilePointer>& files) const;
  bool shows_need_of_mark(const SpooledFile& file);
  void require_right_to_remove();
  void mark();
  void take_back_mark() noexcept;
  void remove_mark();
  void require_own_names(const std::vector<FilePointer>& files);
  ObjectVersion left_version(const std::string& url, const std::vector<UploadedPart>& parts,
                             const std::string& etag);
  void require_replaced_unchanged() const;
  bool replaces_one_object(const std::vector<FilePointer>& files) const;
  bool remove_old_objects_before(const std::vector<FilePointer>& files) const;
  void remove_old_objects_after(const std::vector<FilePointer>& files) const;
  void require_no_objects_of_others(const std::string& replaced_url = {}) const;
  std::string name_of(const SpooledFile& file) const;

  const std::string folder_;
  const SpoolOptions options_;
  const std::string path_;
  const std::string parent_url_;
  S3Uploads uploads_;
  mutable std::mutex mutex_;                  // guards all below
  std::map<std::string, FilePointer> files_;  // key: local path
  std::map<std::string, Begun> begun_;        // unfinished uploads, by their IDs
  bool is_claimed_ = false;
  bool is_marked_;                     // kIncompleteMark is at the URL
  bool may_remove_ = false;            // `require_right_to_remove` was called
  bool is_any_without_index_ = false;  // SpoolOptions::may_be_whole_without_index holds for a file
  bool has_begun_to_replace_ = false;
  StoredObjects left_;       // objects of the interrupted run that this one resumes, by URL
  StoredObjects published_;  // objects that have appeared, by URL
  UploadWorkers workers_;    // destroyed first: its tasks use the other members
};

}  // namespace tessera::object_store
