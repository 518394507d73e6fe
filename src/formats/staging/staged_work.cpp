#include "formats/staging/staged_work.h"

#include <cstdint>
#include <limits>
#include <span>
#include <utility>

#include "base/named_object.h"
#include "formats/staging/extra_copies.h"
#include "formats/staging/own_files.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

using tessera::detail::inode_of_name;

/// Returns the identity with today's names of options. Older journals name options as on a command
/// line: `plan, --only`.
ResumeIdentity with_plain_names(ResumeIdentity identity) {
  const std::string old_prefix = std::string(kPlanExplanation) + "--";
  ResumeIdentity plain;
  for (auto& [name, text] : identity) {
    const bool is_old = name.starts_with(old_prefix);
    plain.emplace(is_old ? kPlanExplanation + name.substr(old_prefix.size()) : name,
                  std::move(text));
  }
  return plain;
}

/// Throws Error(mismatch) naming the first difference between the kept work and this run.
void require_same_work(const ResumeIdentity& kept, const JournalOptions& options,
                       const std::string& path) {
  const auto difference = first_difference(kept, options.identity);
  if (!difference) return;
  throw Error::expected(ErrorKind::mismatch, {.path = path},
                        "source or options have changed: " + printable(difference->name),
                        printable(difference->before), printable(difference->now),
                        Remedy{Remedy::Action::discard});
}

/// Decides what to do with the work that a dead process left. If it is resumed, fills `left_over`.
StagedDestination::LeftOver judge(FileSystem& fs, const WorkOptions& options,
                                  const StagedDestination& staged,
                                  std::optional<JournalContents>& left_over) {
  using enum StagedDestination::LeftOver;
  const bool is_shared = SharedWork(fs, staged.destination()).is_begun();
  if (!options.journal) return is_shared || staged.has_kept_work() ? kept : remove;
  if (options.share) {
    // Work that one process began alone cannot be divided into shares later.
    if (options.share->step == ShareOptions::Step::write) {
      return staged.has_kept_work() ? kept : remove;
    }
    left_over = SharedWork(fs, staged.destination()).all_blocks();
    return go_on;
  }
  // Checked first, so that work can be discarded even if its journal cannot be read, such as one of
  // a later release.
  if (options.journal->kept_work == KeptWork::discard) return remove;
  if (is_shared) return kept;
  auto contents = read_journal(fs, staged.journal_path());
  if (!contents) return remove;
  if (options.journal->kept_work == KeptWork::refuse) return kept;
  require_same_work(with_plain_names(contents->identity), *options.journal, staged.staging_path());
  left_over = std::move(contents);
  return go_on;
}

/// Throws if a resuming writer could not write into the object at `path`, for example because it is
/// a link.
void require_writable(FileSystem& fs, const std::string& path) {
  fs.open_for_update(path)->close();
}

/// The files that a writer makes in its directory.
struct OwnFiles {
  std::set<std::string> names;
  std::set<std::string> linked_names;  // those of `names` that are hard links; never written into
};

void require_own_file(FileSystem& fs, const std::string& directory, const std::string& name,
                      const OwnFiles& own) {
  const std::string path = join_path(directory, name);
  if (!own.names.contains(name)) {
    throw Error(
        ErrorKind::already_exists, {.path = path},
        "kept work: the interrupted run did not write this file, but it would become part of the "
        "checkpoint (remove or rename it)");
  }
  if (!own.linked_names.contains(name)) require_writable(fs, path);
}

/// Throws if a directory holds a file that is not in `own`, or one that cannot be written into.
/// `folder`: checks only this folder of the directory; empty: the directory itself.
void require_own_files(FileSystem& fs, const std::string& directory, const OwnFiles& own,
                       const std::string& folder = {}) {
  const std::string listed = folder.empty() ? directory : join_path(directory, folder);
  for (const std::string& name : fs.list_directory(listed)) {
    const std::string path = folder.empty() ? name : join_path(folder, name);
    if (has_file_in(own.names, path) && is_plain_folder(join_path(directory, path))) {
      require_own_files(fs, directory, own, path);
    } else {
      require_own_file(fs, directory, path, own);
    }
  }
}

}  // namespace

WorkOptions work_options(const CreateOptions& options) {
  WorkOptions work{options.overwrite, options.journal, options.extra_files};
  if (work.journal) work.journal->identity.merge(identify_extra_files(options.extra_files));
  return work;
}

WorkOptions work_options(const CreateOptions& options, const ShareOptions& share) {
  WorkOptions work = work_options(options);
  TESSERA_CHECK(work.journal.has_value());
  work.share = share;
  return work;
}

StagedWork::StagedWork(FileSystem& fs, std::string destination, DestinationKind kind,
                       const WorkOptions& options)
    : fs_(fs),
      destination_(without_trailing_slashes(std::move(destination))),
      staging_path_(StagedDestination::staging_path_of(destination_)),
      extra_names_(names_of(options.extra_files)),
      linked_names_(options.linked_names) {
  if (options.share) shared_.emplace(fs_, destination_);
  if (options.share && options.share->step == ShareOptions::Step::write) {
    join(kind, options);
  } else {
    stage(kind, options);
  }
}

/// Becomes the owner of the staging path. Creates the journal and copies the extra files.
void StagedWork::stage(DestinationKind kind, const WorkOptions& options) {
  std::optional<SharedWork> others;  // what workers of an earlier move left
  if (!shared_) others.emplace(fs_, destination_);
  if (others && options.journal && options.journal->kept_work == KeptWork::discard) {
    others->discard();
  }
  staged_.emplace(fs_, destination_, kind, options.overwrite,
                  [&](const auto& staged) { return judge(fs_, options, staged, left_over_); });
  if (!extra_names_.empty() && kind != DestinationKind::directory) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = destination_}, "extra files",
                          "a directory to copy them into", "a single file");
  }
  if (others) others->remove_ended();
  staged_->set_extra_names(extra_names_);
  if (!options.journal) {
    name_extra_files(options.extra_files);
  } else if (left_over_) {
    journal_.emplace(fs_, staged_->journal_path(), *std::exchange(left_over_, std::nullopt));
  } else {
    journal_.emplace(fs_, staged_->journal_path(), options.journal->identity);
  }
  copy_extra_files(options.extra_files);
}

/// Begins the shared work, if no other process has begun it, and takes a share.
void StagedWork::join(DestinationKind kind, const WorkOptions& options) {
  const ShareOptions& share = *options.share;
  share_ = share.index;
  // Hold the lock until this worker has looked at its share. Otherwise another worker could finish
  // the work, if all shares are complete, and remove its folder.
  const auto lock = shared_->lock();
  if (!shared_->is_begun()) {
    shared_->clear();
    if (share.beginning == ShareOptions::Beginning::refused) {
      shared_->remove();
      throw Error(ErrorKind::already_exists, {.path = destination_},
                  "shared work: another worker has just finished it");
    }
    try {
      WorkOptions with_token = options;
      with_token.journal->identity = SharedWork::with_new_token(options.journal->identity);
      stage(kind, with_token);
      journal_->sync();  // without it, the work would not be known again
      shared_->begin(with_token.journal->identity, share.num_shares, share.command);
    } catch (...) {
      shared_->remove();
      throw;
    }
    staged_->keep();
    journal_.reset();
    staged_.reset();
  }
  shared_->require_same(options.journal->identity, share.num_shares);
  auto held = shared_->try_lock_share(share_);
  if (!held) shared_->refuse_held(share_);
  share_lock_ = std::move(*held);
  shared_->name_holder(share_);
  if (options.journal->kept_work == KeptWork::discard && shared_->is_complete(share_)) {
    shared_->unmark_complete(share_);
  }
  if (!shared_->is_complete(share_)) open_share_journal(options);
}

void StagedWork::open_share_journal(const WorkOptions& options) {
  const std::string path = shared_->journal_path(share_);
  auto blocks = read_journal(fs_, path);
  if (options.journal->kept_work == KeptWork::discard) blocks.reset();
  if (blocks && options.journal->kept_work == KeptWork::refuse) {
    throw Error(ErrorKind::already_exists, {.path = staging_path_},
                "staging: the work of an interrupted worker is kept here: part " +
                    std::to_string(share_) + " of " + std::to_string(options.share->num_shares),
                {Remedy::Action::resume_or_discard});
  }
  if (blocks) {
    journal_.emplace(fs_, path, *std::move(blocks));
  } else {
    fs_.remove_all(path);
    journal_.emplace(fs_, path, ResumeIdentity{});
  }
  journal_->set_shared();
}

/// Writes a journal that names the extra files and lists no finished block.
void StagedWork::name_extra_files(const std::vector<ExtraFile>& files) {
  if (files.empty()) return;
  Journal(fs_, staged_->journal_path(), identify_extra_files(files));
}

/// Copies all extra files, even those that an interrupted run has copied already.
void StagedWork::copy_extra_files(const std::vector<ExtraFile>& files) {
  for (const ExtraFile& file : files) {
    const std::string path = join_path(staging_path(), file.name);
    if (is_resumed() && tessera::detail::mode_of_name(path)) {
      require_writable(fs_, path);
      fs_.remove_all(path);
    }
    copy_extra_file(fs_, file, path);
    extra_files_.push_back({.path = file.path, .name = file.name, .state = file.state});
  }
}

bool StagedWork::check(FileSystem& fs, std::string destination, DestinationKind kind,
                       const WorkOptions& options, const std::set<std::string>& names) {
  const std::string staging_path = StagedDestination::staging_path_of(destination);
  std::optional<JournalContents> left_over;
  StagedDestination::check(
      fs, std::move(destination), kind, options.overwrite,
      [&](const auto& staged) { return judge(fs, options, staged, left_over); });
  if (!left_over) return false;
  require_writable(fs, StagedDestination::journal_path_of(staging_path));
  if (kind == DestinationKind::directory) {
    std::set<std::string> own_names = names_of(options.extra_files);
    own_names.insert(names.begin(), names.end());
    require_own_files(fs, staging_path, {std::move(own_names), options.linked_names});
  } else {
    require_writable(fs, staging_path);
  }
  return true;
}

void StagedWork::set_file_names(const std::set<std::string>& names) {
  if (is_share()) return;  // the directory also holds files of other shares
  staged_->set_file_names(names);
  if (!is_resumed()) return;
  std::set<std::string> own_names = extra_names_;
  own_names.insert(names.begin(), names.end());
  require_own_files(fs_, staging_path(), {std::move(own_names), linked_names_});
}

bool StagedWork::keep() noexcept {
  if (!journal_ || !journal_->has_finished_blocks()) return false;
  if (staged_) staged_->keep();
  return true;
}

/// Restores the side files of the checkpoint that will be replaced, and returns how to remove them
/// later.
std::vector<const SideFiles*> StagedWork::replaced_side_files() {
  std::vector<const SideFiles*> replaced;
  if (!staged_->replaces()) return replaced;
  for (const FormatDriver* driver : format_drivers()) {
    const SideFiles* side_files = driver->side_files();
    if (side_files == nullptr) continue;
    side_files->restore(fs_, destination());
    if (side_files->named_by(fs_, destination())) replaced.push_back(side_files);
  }
  return replaced;
}

/// `publish` moves the replaced checkpoint to the staging path. A journal beside it would make it
/// look like unfinished work, so the journal is emptied first. If `publish` fails before the
/// exchange, the journal is restored.
void StagedWork::publish_in_exchange() {
  journal_->flush();
  const std::string text =
      read_file(fs_, staged_->journal_path(), std::numeric_limits<std::uint64_t>::max());
  const auto staged_inode = inode_of_name(staging_path());
  try {
    if (shared_) shared_->begin_exchange();
    staged_->reset_journal_for_exchange();
    staged_->publish();
  } catch (...) {
    const bool is_staged = staged_inode && is_still_staged(*staged_inode);
    if (shared_ && is_staged) shared_->undo_exchange();
    if (!is_staged || !put_back_journal(text)) journal_.reset();
    throw;
  }
  journal_.reset();
}

/// Whether the staging path has the object `inode`, and no exchange has begun. False also if this
/// cannot be told: what is not known to be staged must keep its journal.
bool StagedWork::is_still_staged(ino_t inode) const noexcept {
  try {
    return inode_of_name(staging_path()) == inode &&
           !tessera::detail::mode_of_name(StagedDestination::old_path_of(destination_));
  } catch (...) {
    return false;
  }
}

bool StagedWork::put_back_journal(const std::string& text) noexcept {
  try {
    const auto file = fs_.open_for_update(staged_->journal_path());
    file->write_at(0, std::as_bytes(std::span(text)));
    file->resize(text.size());
    file->close();
    return true;
  } catch (...) {
    return false;
  }
}

void StagedWork::commit(ReplacedSideFiles side_files) {
  for (const ExtraFile& file : extra_files_) require_unchanged(file);
  std::vector<const SideFiles*> removed;
  if (side_files == ReplacedSideFiles::remove) removed = replaced_side_files();
  if (journal_ && staged_->replaces()) {
    publish_in_exchange();
  } else if (!extra_names_.empty() && staged_->replaces()) {
    staged_->reset_journal_for_exchange();
  }
  staged_->commit();
  for (const SideFiles* files : removed) files->remove(fs_, destination());
  if (shared_) shared_->remove();
}

void StagedWork::commit_share() {
  TESSERA_CHECK(is_share());
  if (!journal_->has_finished_blocks()) {
    shared_->mark_complete(share_, SharedWork::Mark::unsynced);
    return;
  }
  journal_->sync();
  shared_->mark_complete(share_);
}

}  // namespace tessera::formats
