#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/file_system.h"

namespace tessera::formats {

/// Makes a destination appear whole or not at all.
///
/// Work happens at `staging_path()`, the sibling `<destination>.partial`, which is made here (an
/// empty directory, or an empty file to be opened with `open_for_update`) and held with an advisory
/// lock on itself while this object lives. `commit()` syncs the directory (each file was synced by
/// its writer), renames it into place (an exchange where something is replaced), and syncs the
/// parent; where it throws, the destination is what it was before. Destroyed without commit, the
/// staging path is removed, unless it is to be kept, and what stood at the destination is
/// untouched. A directory then loses the files that have a writer's names; if somebody has put
/// others there, it stays with them, and without a journal.
///
/// [Note: Left over] A journal, the file `<destination>.partial.journal`, lies beside a staging
/// path for as long as anything is in it, and so tells that it is a writer's. What a dead process
/// left is taken over and emptied, unless the caller goes on with it; whatever else has the name,
/// unless it is empty, is somebody's and stays. Callers that keep work let the journal tell what is
/// finished: such work is refused unless the caller knows about journals. A journal of one line
/// tells of nothing: what it lies beside may also be a checkpoint that was replaced. Members of a
/// checkpoint have none: there the name is enough. Not thread-safe; the files inside are the
/// writer's own.
class StagedDestination {
 public:
  static constexpr std::string_view kSuffix = ".partial";
  static constexpr std::string_view kJournalSuffix = ".journal";         // behind the staging path
  static constexpr std::string_view kJournalMagic = "tessera-journal ";  // of any version
  static constexpr std::string_view kJournalFirstLine =
      "tessera-journal 1\n";  // with the line feed

  /// What is done about what a dead process left.
  enum class LeftOver {
    remove,
    go_on,    // it stays also where the destination is destroyed without commit
    kept,     // refused as work that another run may go on with
    foreign,  // refused as somebody's
  };
  /// Says what a staging path that is there already is.
  using Judge = std::function<LeftOver(const StagedDestination&)>;

  /// Returns where the work towards a destination lies. Trailing slashes are ignored.
  static std::string staging_path_of(const std::string& destination);
  /// Returns where the journal of the work in a staging path lies.
  static std::string journal_path_of(const std::string& staging_path);

  /// Whether `path` leads to a staging path beside which a journal tells what the work is.
  static bool is_work_in_progress(const FileSystem& fs, const std::string& path);

  /// Returns the staging path of a destination where it holds what a writer was done with and could
  /// not remove; nothing where it holds work, or a writer is at it.
  static std::optional<std::string> left_over_at(const FileSystem& fs,
                                                 const std::string& destination);

  /// Trailing slashes of `destination` are ignored. Its parent must exist. `judge` is asked, under
  /// the lock, about what a dead process left; without it work that is kept is refused, and
  /// anything else removed.
  /// Throws: Error(already_exists) where the destination is in the way and `overwrite` is refuse,
  /// or is a link that leads nowhere, where another living process holds the staging path, or where
  /// what lies there or is named like its journal is refused; what `judge` throws. Then all is left
  /// as it is.
  StagedDestination(FileSystem& fs, std::string destination, DestinationKind kind,
                    OverwritePolicy overwrite, const Judge& judge = {});
  /// Throws what the constructor would, and changes nothing.
  static void check(FileSystem& fs, std::string destination, DestinationKind kind,
                    OverwritePolicy overwrite, const Judge& judge = {});
  ~StagedDestination();
  StagedDestination(const StagedDestination&) = delete;
  StagedDestination& operator=(const StagedDestination&) = delete;

  const std::string& destination() const { return destination_; }
  const std::string& staging_path() const { return staging_path_; }
  std::string journal_path() const { return journal_path_of(staging_path_); }
  /// Whether a journal tells of finished blocks.
  bool has_kept_work() const;

  /// Whether what a dead process left is gone on with.
  bool has_left_over() const { return has_left_over_; }
  /// Makes the journal say of nothing that it is finished.
  void reset_journal();
  /// Leaves staging path and journal where they are when this is destroyed without commit.
  void keep() noexcept { is_kept_ = true; }
  /// Whether `publish` would replace something.
  bool replaces() const;

  /// Makes the destination appear, durably, but keeps what it replaced: destroyed without commit,
  /// the destination is what it was before. For destinations that must appear together.
  void publish();
  /// Publishes, unless that is done, and lets go of what was replaced.
  void commit();

 private:
  struct NothingStaged {};
  /// Throws on a destination that cannot be written to.
  StagedDestination(FileSystem& fs, std::string destination, DestinationKind kind,
                    OverwritePolicy overwrite, NothingStaged);

  void stage(const Judge& judge);
  bool is_left_over() const;
  LeftOver judge_left_over(const Judge& judge) const;
  bool empty_or_go_on(const Judge& judge);
  bool empty();
  bool has_journal() const;
  void remove_own_files();
  void remove_quietly() noexcept;

  FileSystem& fs_;
  std::string destination_;
  std::string staging_path_;
  DestinationKind kind_;
  OverwritePolicy overwrite_;
  int lock_fd_ = -1;           // of what is staged, wherever it stands
  int replaced_lock_fd_ = -1;  // of what it replaced, while that stands at the staging path
  bool has_left_over_ = false;
  bool is_kept_ = false;
  bool had_foreign_entry_ = false;  // what is at the destination
  enum class State { none, staged, appeared, replaced, committed } state_ = State::none;
};

}  // namespace tessera::formats
