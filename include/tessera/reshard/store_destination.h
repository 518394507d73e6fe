#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/create.h"

namespace tessera::reshard {

/// How a checkpoint is written to an object store.
struct StoreOptions {
  formats::Format format{};                             // of the new checkpoint
  OverwritePolicy overwrite = OverwritePolicy::refuse;  // what to do with an existing checkpoint
  formats::KeptWork kept_work = formats::KeptWork::refuse;    // what to do with unfinished uploads
  std::string overwrite_option = "OverwritePolicy::replace";  // names `overwrite` in messages
  /// Extra files of the new checkpoint. The replaced checkpoint may have equal files too.
  std::vector<formats::ExtraFile> extra_files{};
  /// The folder in which a folder for this destination is made (the spool). Empty: TMPDIR, or /tmp.
  std::string spool{};
};

/// A destination on an object store. A writer writes it on a local file system, `file_system()`, at
/// `path()`. The bytes are uploaded while they are written. The commit of the writer makes the
/// checkpoint appear at the URL; before that, readers see nothing new there.
///
/// Disk: the files that are being written, and the first 16 MiB of each file. Memory: four parts of
/// 16 MiB; the parts are larger for files of over 156 GiB. Thread-safe like a FileSystem.
class StoreDestination {
 public:
  /// Throws: Error(already_exists) if something is at the URL and must not be replaced, or if an
  /// interrupted run has left uploads that the options refuse; Error(invalid_argument) if something
  /// other than a checkpoint would be replaced; Error(io).
  StoreDestination(const std::string& url, const StoreOptions& options);
  ~StoreDestination();
  StoreDestination(const StoreDestination&) = delete;
  StoreDestination& operator=(const StoreDestination&) = delete;

  /// Returns the file system for the writer. The file system lives as long as this object.
  FileSystem& file_system();
  /// Returns the local path at which the writer makes the checkpoint. At the start of each run,
  /// nothing is at this path.
  const std::string& path() const;

  /// Calls `work`, which writes the checkpoint. If it throws, the errors name the URL. After an
  /// error that may not occur in the next run (a lost connection), the server keeps the uploaded
  /// parts; after other errors they are removed.
  template <class Work>
  auto run(const Work& work) {
    try {
      return work();
    } catch (const Error& error) {
      end_after(error);
    }
  }

 private:
  struct State;

  [[noreturn]] void end_after(const Error& error);

  std::unique_ptr<State> state_;
};

}  // namespace tessera::reshard
