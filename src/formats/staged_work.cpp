#include "formats/staged_work.h"

#include <algorithm>
#include <span>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/formats/detect.h"

namespace tessera::formats {
namespace {

/// Whether the file may be what a writer of a single file has left: nothing but zeros so far, or a
/// checkpoint, be it what was replaced. A damaged one is one.
bool may_be_begun(const FileSystem& fs, const std::string& path) {
  constexpr std::uint64_t kLookedAtNbytes = 512;
  std::string begin;
  {
    const auto file = fs.open(path);
    begin.resize(std::min(kLookedAtNbytes, file->nbytes()));
    file->read_at(0, std::as_writable_bytes(std::span(begin)));
  }
  if (begin.find_first_not_of('\0') == std::string::npos) return true;
  try {
    detect_format(fs, path);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::unsupported) return false;
    if (error.kind() != ErrorKind::corruption) throw;
  }
  return true;
}

std::optional<std::string> said_of(const WorkIdentity& identity, const std::string& name) {
  const auto found = identity.find(name);
  return found == identity.end() ? std::nullopt : std::optional(found->second);
}

/// Returns a member's name for those who are told of it.
std::string spelled(const std::string& name, OptionSpelling spelling) {
  const std::string before_option = std::string(kPlanExplanation) + "--";
  if (!name.starts_with(before_option)) return name;
  return kPlanExplanation + spelled_option(name.substr(before_option.size()), "", spelling);
}

/// Throws Error(mismatch) naming the first difference. Digests tell least, and so come last, behind
/// what the plan was made of.
void require_same_work(const WorkIdentity& kept, const JournalOptions& options,
                       const std::string& path) {
  const WorkIdentity& wanted = options.identity;
  const auto require_same = [&](const std::string& name) {
    const auto before = said_of(kept, name);
    const auto now = said_of(wanted, name);
    if (before == now) return;
    throw Error::expected(
        ErrorKind::mismatch, {.path = path},
        "kept work of another kind: " + printable(spelled(name, options.spelling)),
        printable(before.value_or("none")), printable(now.value_or("none")),
        "source or options have changed since; see " +
            spelled_option("discard", "", options.spelling));
  };
  WorkIdentity all = kept;
  all.insert(wanted.begin(), wanted.end());
  WorkIdentity explanations;
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

}  // namespace

StagedWork::StagedWork(FileSystem& fs, std::string destination, DestinationKind kind,
                       const WorkOptions& options)
    : fs_(fs),
      kind_(kind),
      staged_(fs, std::move(destination), kind, options.overwrite,
              [&](const StagedDestination& staged) { return judge(options, staged); }) {
  if (!options.journal) return;
  if (left_over_) {
    journal_.emplace(fs_, staged_.journal_path(), *std::exchange(left_over_, std::nullopt));
    return;
  }
  try {
    journal_.emplace(fs_, staged_.journal_path(), options.journal->identity);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::already_exists) remove_journal_quietly();
    throw;
  }
}

/// Says what becomes of what a dead process left.
StagedDestination::LeftOver StagedWork::judge(const WorkOptions& options,
                                              const StagedDestination& staged) {
  using enum StagedDestination::LeftOver;
  const auto removable = [&] {
    return kind_ == DestinationKind::directory || may_be_begun(fs_, staged.staging_path())
               ? remove
               : foreign;
  };
  if (!options.journal) return staged.has_kept_work() ? kept : removable();
  // A journal that cannot be read, such as a later release's, is not in the way of that.
  if (options.journal->kept_work == KeptWork::discard && staged.has_kept_work()) return remove;
  left_over_ = read_journal(fs_, staged.journal_path());
  if (!left_over_) return removable();
  switch (options.journal->kept_work) {
    case KeptWork::refuse:
      return kept;
    case KeptWork::resume:
      require_same_work(left_over_->identity, *options.journal, staged.staging_path());
      return go_on;
    case KeptWork::discard:
      break;
  }
  left_over_.reset();
  return remove;
}

void StagedWork::require_no_files_but(std::set<std::string> names) const {
  if (!goes_on()) return;
  for (const std::string& name : fs_.list_directory(staging_path())) {
    if (names.contains(name)) continue;
    throw Error(ErrorKind::already_exists, {.path = join_path(staging_path(), name)},
                "kept work: this file is none of its own, and would become part of the checkpoint "
                "(remove or rename it)");
  }
}

StagedWork::~StagedWork() {
  if (journal_ && !is_kept_ && !goes_on()) remove_journal_quietly();
}

void StagedWork::remove_journal() {
  journal_.reset();
  fs_.remove_all(staged_.journal_path());
}

void StagedWork::remove_journal_quietly() noexcept {
  try {
    remove_journal();
  } catch (...) {
    // Without what it is about, the next writer removes it.
  }
}

bool StagedWork::keep() noexcept {
  if (!journal_ || !journal_->has_finished_blocks()) return false;
  staged_.keep();
  is_kept_ = true;
  return true;
}

void StagedWork::commit() {
  // What the destination is exchanged for must not be taken for the work that the journal is about.
  if (journal_ && staged_.replaces()) remove_journal();
  staged_.commit();
  if (journal_) remove_journal_quietly();
}

}  // namespace tessera::formats
