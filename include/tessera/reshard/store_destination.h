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
  /// Extra files of the new checkpoint. A replaced checkpoint may have these files only if equal.
  std::vector<formats::ExtraFile> extra_files{};
  /// Where the spool, a local folder for this destination, is made. Empty: in TMPDIR, else /tmp.
  std::string spool{};
};

/// A destination on an object store. A writer writes it on the local file system `file_system()`,
/// at `path()`, and this object uploads the bytes while they are written. The writer's commit makes
/// the checkpoint appear at the URL; before that, readers see nothing new there.
///
/// Local disk: the files that are being written, and the first 16 MiB of each file. Memory: four
/// upload parts of 16 MiB; larger parts for files of over 156 GiB. Thread-safe like a FileSystem.
class StoreDestination {
 public:
  /// Throws: Error(already_exists) if something is at the URL and `overwrite` is `refuse`, or if an
  /// interrupted run has left uploads and `kept_work` is `refuse`; Error(invalid_argument) if
  /// something other than a checkpoint would be replaced; Error(io).
  StoreDestination(const std::string& url, const StoreOptions& options);
  ~StoreDestination();
  StoreDestination(const StoreDestination&) = delete;
  StoreDestination& operator=(const StoreDestination&) = delete;

  /// Returns the file system for the writer. It lives as long as this object, which owns it.
  FileSystem& file_system();
  /// Returns the local path at which the writer makes the checkpoint. At the start of each run,
  /// nothing is at this path.
  const std::string& path() const;

  /// Calls `work`, which writes the checkpoint, and returns its result. If `work` throws an Error,
  /// throws it again, with URLs in place of local paths. If the next run may succeed (such as after
  /// a lost connection), first lets the server keep the uploaded parts; otherwise removes them.
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
