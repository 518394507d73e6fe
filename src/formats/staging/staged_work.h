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
  std::optional<JournalOptions> journal{};  // none: nothing is kept
  std::vector<ExtraFile> extra_files{};     // copied into the staging directory
  std::optional<ShareOptions> share{};      // of work by several processes; needs a journal
  /// Of the writer's files, those that are hard links to files of another checkpoint. Nothing
  /// writes into them.
  std::set<std::string> linked_names{};
};

/// Returns the options of a writer. The journal's identity names the extra files.
WorkOptions work_options(const CreateOptions& options);
/// As above, for one of several processes that write together.
WorkOptions work_options(const CreateOptions& options, const ShareOptions& share);

/// What to do with the files beside a single-file checkpoint that is replaced (SideFiles): `keep`
/// if the writer handles them itself.
enum class ReplacedSideFiles { remove, keep };

/// A staged destination with copies of the extra files and, if wanted, with a journal of its
/// finished blocks. The extra files are copied at the start, so that a full disk or a changed file
/// is noticed before any work. `commit` checks again that they have not changed.
///
/// With WorkOptions::share, this is one process's side of shared work ([Note: Shared work]). To
/// write a share, it uses the staging path without owning it: `commit_share` takes the place of
/// `commit`, and destroying this removes nothing. To finish, it owns the staging path, and resumes
/// the blocks of all shares; the caller then holds SharedWork::lock.
///
/// If this is destroyed without commit, everything is removed, except resumed work and work for
/// which `keep` returned true. The next writer removes what is left of work without finished
/// blocks. Not thread-safe, except the journal.
class StagedWork {
 public:
  /// Throws:
  /// - what the constructor of StagedDestination throws;
  /// - Error(already_exists) if there is kept work and the options refuse it (without a journal, it
  ///   is always refused);
  /// - Error(mismatch) naming the difference if the options resume kept work, but it is the work of
  ///   another run;
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
  /// Throws what the constructor and then `set_file_names` would throw, and changes nothing.
  /// Returns whether work would be resumed.
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
  /// Whether this is one worker's share of a move: other workers may have created its files.
  bool is_share() const { return !staged_; }

  /// Names all files that the writer makes in the directory, apart from the extra files. Files of
  /// other names would become part of the destination. So this function refuses them in resumed
  /// work, and `commit` refuses them in any work. This function also refuses resumed work if one of
  /// its files cannot be written into.
  /// Throws: Error(already_exists) naming the first file.
  void set_file_names(const std::set<std::string>& names);

  /// Keeps the finished blocks if this is destroyed without commit. Returns whether there are any.
  bool keep() noexcept;
  /// Commits the destination. If this throws before anything is replaced, the finished blocks can
  /// still be kept. Throws: Error(corruption) if an extra file has changed since it was copied.
  void commit(ReplacedSideFiles side_files = ReplacedSideFiles::remove);
  /// Records durably that this share is complete. Requires: the share's blocks are synced.
  void commit_share();

 private:
  void stage(DestinationKind kind, const WorkOptions& options);
  void join(DestinationKind kind, const WorkOptions& options);
  void open_share_journal(const WorkOptions& options);
  void name_extra_files(const std::vector<ExtraFile>& files);
  void copy_extra_files(const std::vector<ExtraFile>& files);
  std::vector<const SideFiles*> replaced_side_files();
  void publish_in_exchange();
  bool put_back_journal(const std::string& text) noexcept;

  FileSystem& fs_;
  const std::string destination_;
  const std::string staging_path_;
  std::set<std::string> extra_names_;
  std::set<std::string> linked_names_;
  std::vector<ExtraFile> extra_files_;  // as they were when they were copied, without their texts
  std::optional<JournalContents> left_over_;  // until `journal_` takes it
  std::optional<StagedDestination> staged_;   // none: this writes a share
  std::optional<SharedWork> shared_;          // if several processes write together
  int share_ = 0;                             // that this writes
  tessera::detail::FileDescriptor share_lock_;
  std::optional<Journal> journal_;
};

}  // namespace tessera::formats
