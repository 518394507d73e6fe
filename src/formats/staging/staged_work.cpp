#include "formats/staging/staged_work.h"

#include <sys/stat.h>

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

std::optional<std::string> said_of(const ResumeIdentity& identity, const std::string& name) {
  const auto found = identity.find(name);
  return found == identity.end() ? std::nullopt : std::optional(found->second);
}

/// Returns the identity with the present names of options. Older journals name options as on a
/// command line: `plan, --only`.
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

/// Throws Error(mismatch) naming the first difference. Compares digests last, after the
/// explanations of the plan, because a difference of digests says least.
void require_same_work(const ResumeIdentity& kept, const JournalOptions& options,
                       const std::string& path) {
  const ResumeIdentity& wanted = options.identity;
  const auto require_same = [&](const std::string& name) {
    const auto before = said_of(kept, name);
    const auto now = said_of(wanted, name);
    if (before == now) return;
    throw Error::expected(ErrorKind::mismatch, {.path = path},
                          "source or options have changed: " + printable(name),
                          printable(before.value_or("none")), printable(now.value_or("none")),
                          Remedy{Remedy::Action::discard});
  };
  ResumeIdentity all = kept;
  all.insert(wanted.begin(), wanted.end());
  ResumeIdentity explanations;
  for (const auto& entry : all) {
    if (entry.first.starts_with(kPlanExplanation)) {
      explanations.insert(entry);
    } else if (entry.first != kPlanDigest && entry.first != kValuesDigest) {
      require_same(entry.first);
    }
  }
  for (const char* digest : {kPlanDigest, kValuesDigest}) {
    if (said_of(kept, digest) == said_of(wanted, digest)) continue;
    for (const auto& entry : explanations) require_same(entry.first);
    require_same(digest);
  }
}

/// Decides what to do with what a dead process left. If the work is resumed, fills `left_over`.
StagedDestination::LeftOver judge(const FileSystem& fs, const WorkOptions& options,
                                  const StagedDestination& staged,
                                  std::optional<JournalContents>& left_over) {
  using enum StagedDestination::LeftOver;
  if (!options.journal) return staged.has_kept_work() ? kept : remove;
  // Discarding works even if the journal cannot be read, such as a journal of a later release.
  if (options.journal->kept_work == KeptWork::discard) return remove;
  auto contents = read_journal(fs, staged.journal_path());
  if (!contents) return remove;
  if (options.journal->kept_work == KeptWork::refuse) return kept;
  require_same_work(with_plain_names(contents->identity), *options.journal, staged.staging_path());
  left_over = std::move(contents);
  return go_on;
}

/// Throws if a resuming writer would not write into the object at `path`, such as a link.
void require_writable(FileSystem& fs, const std::string& path) {
  fs.open_for_update(path)->close();
}

void require_own_file(FileSystem& fs, const std::string& directory, const std::string& name,
                      const std::set<std::string>& names) {
  const std::string path = join_path(directory, name);
  if (!names.contains(name)) {
    throw Error(ErrorKind::already_exists, {.path = path},
                "kept work: this file does not belong to it, but would become part of the "
                "checkpoint (remove or rename it)");
  }
  require_writable(fs, path);
}

/// `folder`: within the directory; empty: the directory itself.
void require_own_files(FileSystem& fs, const std::string& directory,
                       const std::set<std::string>& names, const std::string& folder = {}) {
  const std::string listed = folder.empty() ? directory : join_path(directory, folder);
  for (const std::string& name : fs.list_directory(listed)) {
    const std::string path = folder.empty() ? name : join_path(folder, name);
    if (has_file_in(names, path) && is_plain_folder(join_path(directory, path))) {
      require_own_files(fs, directory, names, path);
    } else {
      require_own_file(fs, directory, path, names);
    }
  }
}

/// Identifies an object independently of its name; returns nothing if there is no object.
std::optional<ino_t> inode_of_name(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) return std::nullopt;
  return status.st_ino;
}

}  // namespace

WorkOptions work_options(const CreateOptions& options) {
  WorkOptions work{options.overwrite, options.journal, options.extra_files};
  if (work.journal) work.journal->identity.merge(identify_extra_files(options.extra_files));
  return work;
}

StagedWork::StagedWork(FileSystem& fs, std::string destination, DestinationKind kind,
                       const WorkOptions& options)
    : fs_(fs),
      extra_names_(names_of(options.extra_files)),
      staged_(fs, std::move(destination), kind, options.overwrite,
              [&](const auto& staged) { return judge(fs, options, staged, left_over_); }) {
  if (!extra_names_.empty() && kind != DestinationKind::directory) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = staged_.destination()},
                          "extra files", "a directory to copy them into", "a single file");
  }
  staged_.set_extra_names(extra_names_);
  if (!options.journal) {
    name_extra_files(options.extra_files);
  } else if (left_over_) {
    journal_.emplace(fs_, staged_.journal_path(), *std::exchange(left_over_, std::nullopt));
  } else {
    fs_.remove_all(staged_.journal_path());  // before it could describe new work
    journal_.emplace(fs_, staged_.journal_path(), options.journal->identity);
  }
  copy_extra_files(options.extra_files);
}

/// Leaves a journal that names the extra files and keeps no work.
void StagedWork::name_extra_files(const std::vector<ExtraFile>& files) {
  if (files.empty()) return;
  fs_.remove_all(staged_.journal_path());
  Journal(fs_, staged_.journal_path(), identify_extra_files(files));
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
    require_own_files(fs, staging_path, own_names);
  } else {
    require_writable(fs, staging_path);
  }
  return true;
}

void StagedWork::set_file_names(const std::set<std::string>& names) {
  staged_.set_file_names(names);
  if (!is_resumed()) return;
  std::set<std::string> own_names = extra_names_;
  own_names.insert(names.begin(), names.end());
  require_own_files(fs_, staging_path(), own_names);
}

bool StagedWork::keep() noexcept {
  if (!journal_ || !journal_->has_finished_blocks()) return false;
  staged_.keep();
  return true;
}

/// Restores and returns the side files of the checkpoint to be replaced.
std::vector<const SideFiles*> StagedWork::replaced_side_files() {
  std::vector<const SideFiles*> replaced;
  if (!staged_.replaces()) return replaced;
  for (const FormatDriver* driver : format_drivers()) {
    const SideFiles* side_files = driver->side_files();
    if (side_files == nullptr) continue;
    side_files->restore(fs_, destination());
    if (side_files->named_by(fs_, destination())) replaced.push_back(side_files);
  }
  return replaced;
}

/// Publishes with an empty journal. Otherwise the replaced checkpoint, which is then at the staging
/// path, could be mistaken for the work. If nothing has been exchanged, restores the journal.
void StagedWork::publish_in_exchange() {
  journal_->flush();
  const std::string text =
      read_file(fs_, staged_.journal_path(), std::numeric_limits<std::uint64_t>::max());
  const auto staged_inode = inode_of_name(staging_path());
  try {
    staged_.reset_journal_for_exchange();
    staged_.publish();
  } catch (...) {
    const bool is_staged = staged_inode && inode_of_name(staging_path()) == staged_inode;
    if (!is_staged || !put_back_journal(text)) journal_.reset();
    throw;
  }
  journal_.reset();
}

bool StagedWork::put_back_journal(const std::string& text) noexcept {
  try {
    const auto file = fs_.open_for_update(staged_.journal_path());
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
  if (journal_ && staged_.replaces()) {
    publish_in_exchange();
  } else if (!extra_names_.empty() && staged_.replaces()) {
    staged_.reset_journal_for_exchange();
  }
  staged_.commit();
  for (const SideFiles* files : removed) files->remove(fs_, destination());
}

}  // namespace tessera::formats
