#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "formats/staging/journal.h"
#include "formats/staging/staged_destination.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/create.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats {

/// What a writer does about what is at its destination, and about the work on the way there.
struct WorkOptions {
  OverwritePolicy overwrite = OverwritePolicy::refuse;
  std::optional<JournalOptions> journal{};  // none: nothing is kept
};

inline WorkOptions work_options(const CreateOptions& options) {
  return {options.overwrite, options.journal};
}

/// What becomes of the files beside a single-file checkpoint that is replaced (SideFiles). They
/// stay where the writer takes care of them itself.
enum class ReplacedSideFiles { remove, keep };

/// A staged destination with the journal of what is finished in it, if one is wanted.
///
/// Destroyed without commit, all is removed; but work that has been gone on with stays, and so does
/// what `keep` was called for. What is left of work without finished blocks is removed by the next
/// writer.
/// Not thread-safe, but for the journal.
class StagedWork {
 public:
  /// Throws: as StagedDestination; Error(already_exists) where work is kept there and is to be
  /// refused, as without a journal it always is; Error(mismatch) naming what differs where it is
  /// other work than is gone on with.
  StagedWork(FileSystem& fs, std::string destination, DestinationKind kind,
             const WorkOptions& options);
  /// Throws what the constructor and then `require_no_files_but` would, and changes nothing. Says
  /// whether work would be gone on with.
  static bool check(FileSystem& fs, std::string destination, DestinationKind kind,
                    const WorkOptions& options, const std::set<std::string>& names = {});
  StagedWork(const StagedWork&) = delete;
  StagedWork& operator=(const StagedWork&) = delete;

  const std::string& destination() const { return staged_.destination(); }
  const std::string& staging_path() const { return staged_.staging_path(); }
  Journal* journal() { return journal_ ? &*journal_ : nullptr; }  // null where none is wanted
  bool is_resumed() const { return staged_.has_left_over(); }

  /// Refuses files in a directory that is gone on with which its writer does not write, as they
  /// would come to lie in the destination, and under the names of its own files what cannot be
  /// written into. Throws: Error(already_exists) naming the first.
  void require_no_files_but(const std::set<std::string>& names) const;

  /// Says whether what is finished stays when this is destroyed without commit.
  bool keep() noexcept;
  /// Where this throws before anything has been replaced, what is finished can still be kept.
  void commit(ReplacedSideFiles side_files = ReplacedSideFiles::remove);

 private:
  std::vector<const SideFiles*> replaced_side_files();
  void publish_in_exchange();
  bool put_back_journal(const std::string& text) noexcept;

  FileSystem& fs_;
  std::optional<JournalContents> left_over_;  // until `journal_` has it
  StagedDestination staged_;
  std::optional<Journal> journal_;
};

}  // namespace tessera::formats
