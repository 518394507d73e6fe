#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/file_descriptor.h"
#include "formats/staging/journal.h"
#include "formats/staging/shared_work.h"
#include "formats/staging/staged_destination.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/create.h"
#include "tessera/formats/format_driver.h"
#include "tessera/formats/format_writer.h"

namespace tessera::formats {

/// What a writer does with an existing destination and with kept work.
struct WorkOptions {
  OverwritePolicy overwrite = OverwritePolicy::refuse;
  std::optional<JournalOptions> journal{};  // none: no work is kept
  std::vector<ExtraFile> extra_files{};     // copied into the staging directory
  std::optional<ShareOptions> share{};      // if several processes write together; needs `journal`
  /// The files that are hard links to files of another checkpoint. They are never written into.
  std::set<std::string> linked_names{};
};

/// Returns the options of a writer. Adds the extra files to the resume identity in the journal.
WorkOptions work_options(const CreateOptions& options);
/// Does the same for one of several processes that write together. Requires: `options.journal`.
WorkOptions work_options(const CreateOptions& options, const ShareOptions& share);

/// What to do with the side files (SideFiles) of a single-file checkpoint that is replaced: remove
/// them, or keep them because the writer handles them itself.
enum class ReplacedSideFiles { remove, keep };

/// A staged destination with copies of the extra files and, if wanted, with a journal of its
/// finished blocks. The extra files are copied at the start, so that a full disk or a changed file
/// is noticed before any work. `commit` checks again that they have not changed.
///
/// With WorkOptions::share, several processes write one destination ([Note: Shared work]), and each
/// has such an object. A process that writes a share does not own the staging path: it calls
/// `commit_share` instead of `commit`, and destroying its object removes nothing. The process that
/// finishes the work owns the staging path, holds SharedWork::lock, and adopts the written blocks.
///
/// If this object is destroyed without commit, it removes the staged files, except resumed work and
/// work for which `keep` returned true. Not thread-safe, except the journal.
class StagedWork {
 public:
  /// Throws:
  /// - what the constructor of StagedDestination throws;
  /// - Error(already_exists) if there is kept work and the options refuse it (without a journal, it
  ///   is always refused);
  /// - Error(mismatch) naming the difference if the options say to resume kept work, but its resume
  ///   identity (source files, plan, options, values) is not this run's;
  /// - Error(corruption) if an extra file has changed;
  /// - Error(invalid_argument) if there are extra files for a single file.
  ///
  /// To write a share, also throws:
  /// - Error(already_exists) if another process writes the share, or if the share has kept work and
  ///   the options refuse it;
  /// - Error(mismatch) if another process began the work with another identity;
  /// - Error(unsupported) if the file system has no locks.
  StagedWork(FileSystem& fs, std::string destination, DestinationKind kind,
             const WorkOptions& options);
  /// Throws the errors of the constructor (except some about extra files and shared work) and of
  /// `set_file_names`. Changes nothing. Returns whether work would be resumed.
  static bool check(FileSystem& fs, std::string destination, DestinationKind kind,
                    const WorkOptions& options, const std::set<std::string>& names = {});
  StagedWork(const StagedWork&) = delete;
  StagedWork& operator=(const StagedWork&) = delete;

  const std::string& destination() const { return destination_; }
  const std::string& staging_path() const { return staging_path_; }
  Journal* journal() { return journal_ ? &*journal_ : nullptr; }  // null if none is wanted
  bool is_resumed() const {
    return staged_ ? staged_->has_left_over() : journal_ && journal_->is_resumed();
  }
  /// Whether this object writes a share. Writers of other shares may create the same files.
  bool is_share() const { return !staged_; }

  /// Sets the names of all files that the writer makes in the directory, apart from the extra
  /// files. A file with another name would become part of the destination, so `commit` throws if
  /// there is one. For resumed work, this function throws for such a file, and for a file that
  /// cannot be written into. Does nothing for a share.
  /// Throws: Error(already_exists) naming the first such file; what opening it to write throws.
  void set_file_names(const std::set<std::string>& names);

  /// If there are finished blocks, keeps them when this object is destroyed without commit, and
  /// returns true. Otherwise returns false.
  bool keep() noexcept;
  /// Commits the destination. If this throws before anything is replaced, the finished blocks can
  /// still be kept. Throws: Error(corruption) if an extra file has changed; what `publish` throws.
  void commit(ReplacedSideFiles side_files = ReplacedSideFiles::remove);
  /// Records that this share is complete; durably if it has blocks. Requires: these are synced.
  void commit_share();

 private:
  void stage(DestinationKind kind, const WorkOptions& options);
  void join(DestinationKind kind, const WorkOptions& options);
  void open_share_journal(const WorkOptions& options);
  void name_extra_files(const std::vector<ExtraFile>& files);
  void copy_extra_files(const std::vector<ExtraFile>& files);
  std::vector<const SideFiles*> replaced_side_files();
  void publish_in_exchange();
  bool is_still_staged(ino_t inode) const noexcept;
  bool put_back_journal(const std::string& text) noexcept;

  FileSystem& fs_;
  const std::string destination_;
  const std::string staging_path_;
  std::set<std::string> extra_names_;
  std::set<std::string> linked_names_;
  std::vector<ExtraFile> extra_files_;  // as they were when they were copied, without their texts
  std::optional<JournalContents> left_over_;  // of resumed work; until `journal_` takes it
  std::optional<StagedDestination> staged_;   // none while this process writes a share
  std::optional<SharedWork> shared_;          // if several processes write together
  int share_ = 0;                             // the number of this process's share
  tessera::detail::FileDescriptor share_lock_;
  std::optional<Journal> journal_;
};

}  // namespace tessera::formats
