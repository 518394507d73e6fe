#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "base/forwarding_file_system.h"
#include "object_store/stored_objects.h"
#include "tessera/base/file_system.h"

namespace tessera::reshard {

/// A file system that remembers which files were made through it. Thread-safe if the wrapped file
/// system is. The wrapped file system must outlive this one.
class RecordingFileSystem final : public ForwardingFileSystem {
 public:
  using ForwardingFileSystem::ForwardingFileSystem;

  /// Returns the current paths of the files that were made; a renamed file has its new path.
  std::set<std::string> made() const;

  std::unique_ptr<WritableFile> create(const std::string& path) override;
  void rename(const std::string& from, const std::string& to) override;
  void remove_all(const std::string& path) override;

 private:
  mutable std::mutex mutex_;
  std::set<std::string> made_;
};

/// One rank's side of the upload of a checkpoint that all ranks write together. All ranks write
/// their files into a local folder that all of them see (the spool). Each rank uploads the files
/// that it wrote. Rank 0 uploads the index last. Not thread-safe, except the file system.
class StoreSave {
 public:
  /// `fs` must outlive this object.
  StoreSave(std::string url, FileSystem& fs) : url_(std::move(url)), fs_(fs), files_(fs) {}
  /// Removes the spool if this object made it and it is empty.
  ~StoreSave();
  StoreSave(const StoreSave&) = delete;
  StoreSave& operator=(const StoreSave&) = delete;

  const std::string& url() const { return url_; }
  FileSystem& file_system() { return files_; }

  /// Makes the spool and returns the local path of the destination. For rank 0. Throws:
  /// Error(already_exists) if `overwrite` is `refuse` and a checkpoint may be there.
  std::string begin(OverwritePolicy overwrite);
  /// Removes the files of the checkpoint that is replaced: its index first, and all others that can
  /// be read without an index. Call it before any of its files is replaced. For rank 0.
  void remove_old_files();
  /// Uploads the files in `directory` that this rank made. Requires: `directory` has no index yet.
  void upload_own_files(const std::string& directory);
  /// Checks that the files of all ranks are at the URL, removes the other files of the replaced
  /// checkpoint, and uploads the index. For rank 0.
  void finish(const std::string& directory);

 private:
  void upload_own_files(const std::string& directory, object_store::Existing existing);

  const std::string url_;
  FileSystem& fs_;
  RecordingFileSystem files_;
  std::string folder_;  // the spool, on rank 0
  object_store::StoredObjects replaced_;
  bool is_marked_ = false;          // kIncompleteMark is at the URL
  std::set<std::string> uploaded_;  // local paths of uploaded files
};

}  // namespace tessera::reshard
