#include "formats/staged_work.h"

#include <utility>

#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

std::string said_of(const WorkIdentity& identity, const std::string& name) {
  const auto found = identity.find(name);
  return found == identity.end() ? "none" : found->second;
}

/// Throws Error(mismatch) naming the first difference.
void require_same_work(const WorkIdentity& kept, const WorkIdentity& wanted,
                       const std::string& path) {
  WorkIdentity all = kept;
  all.insert(wanted.begin(), wanted.end());
  for (const auto& [name, text] : all) {
    const std::string before = said_of(kept, name);
    const std::string now = said_of(wanted, name);
    if (before != now) {
      throw Error::expected(ErrorKind::mismatch, {.path = path},
                            "kept work of another kind: " + printable(name), printable(before),
                            printable(now), "source or options have changed since; see --discard");
    }
  }
}

}  // namespace

StagedWork::StagedWork(FileSystem& fs, std::string destination, DestinationKind kind,
                       const WorkOptions& options)
    : fs_(fs),
      staged_(fs, std::move(destination), kind, options.overwrite,
              [&](const StagedDestination& staged) {
                return options.journal && examine_left_over(*options.journal, staged);
              }) {
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

/// Says whether what a dead process left is to be gone on with.
bool StagedWork::examine_left_over(const JournalOptions& options, const StagedDestination& staged) {
  left_over_ = read_journal(fs_, staged.journal_path());
  if (!left_over_ || options.kept_work == KeptWork::discard) {
    left_over_.reset();
    return false;
  }
  if (options.kept_work == KeptWork::refuse) {
    throw Error(ErrorKind::already_exists, {.path = staged.staging_path()},
                "staging: what an earlier run has finished is kept here (--resume goes on with it, "
                "--discard starts from the beginning)");
  }
  require_same_work(left_over_->identity, options.identity, staged.staging_path());
  return true;
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
