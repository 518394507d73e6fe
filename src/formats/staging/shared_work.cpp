#include "formats/staging/shared_work.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <set>
#include <span>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/advisory_lock.h"
#include "base/current_stop.h"
#include "base/named_object.h"
#include "base/random_name.h"
#include "formats/staging/staged_destination.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

using tessera::detail::CurrentStop;
using tessera::detail::FileDescriptor;
using tessera::detail::inode_of_name;
using tessera::detail::LockResult;
using tessera::detail::mode_of_name;
using tessera::detail::status_of_name;

constexpr std::string_view kSuffix = ".shares";  // after the staging path
constexpr const char* kLockName = "lock";
constexpr const char* kWorkName = "work";
constexpr const char* kCommandName = "command";
constexpr const char* kExchangeName = "exchange";
constexpr const char* kEndedName = "work.ended";  // made by earlier releases
constexpr std::string_view kSharePrefix = "share-";
constexpr std::string_view kComparisonPrefix = "base-";
constexpr std::string_view kDoneSuffix = ".done";
constexpr std::string_view kNewSuffix = ".new";
constexpr std::string_view kDoneText = "complete, written by ";
// Names in the stored identity:
constexpr const char* kNumShares = "number of workers";
constexpr const char* kToken = "shared work";
constexpr std::uint64_t kMaxTextNbytes = std::uint64_t{16} << 20;
constexpr std::chrono::milliseconds kPollInterval{20};

void write_text(FileSystem& fs, const std::string& path, const std::string& text,
                SharedWork::Mark mark = SharedWork::Mark::synced) {
  const auto file = fs.create(path);
  file->write_at(0, std::as_bytes(std::span(text)));
  if (mark == SharedWork::Mark::synced) file->sync();
  file->close();
}

[[noreturn]] void refuse_no_locks(const std::string& path) {
  throw Error::expected(ErrorKind::unsupported, {.path = path}, "shared work",
                        "a file system with locks, so that no two workers write the same share",
                        "none",
                        "is it mounted without locks, such as NFS with nolock or Lustre without "
                        "flock?");
}

[[noreturn]] void refuse_folder(const std::string& path, const std::string& found) {
  throw Error::expected(ErrorKind::already_exists, {.path = path}, "folder of shared work",
                        "a folder that this user's workers have made", found,
                        "rename or remove it");
}

std::string this_process() {
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  return std::string(host) + ", process " + std::to_string(::getpid());
}

ResumeIdentity with_num_shares(ResumeIdentity identity, int num_shares) {
  identity[kNumShares] = std::to_string(num_shares);
  return identity;
}

/// Returns whether workers create a file of this name in the folder of shared work.
bool is_own_name(std::string_view name) {
  if (name == kLockName || name == kCommandName || name == kExchangeName) return true;
  if (name == kEndedName) return true;
  if (name == kWorkName || name == std::string(kWorkName) + ".new") return true;
  const bool is_of_comparison = name.starts_with(kComparisonPrefix);
  if (!is_of_comparison && !name.starts_with(kSharePrefix)) return false;
  name.remove_prefix((is_of_comparison ? kComparisonPrefix : kSharePrefix).size());
  const std::size_t digits = std::min(name.find_first_not_of("0123456789"), name.size());
  const std::string_view suffix = name.substr(digits);
  return digits > 0 && (suffix.empty() || suffix == ".lock" ||
                        suffix == (is_of_comparison ? kNewSuffix : kDoneSuffix));
}

/// Returns the inode number in the file `exchange` of shared work. Returns nothing without such a
/// file, or if its line is not complete: then the checkpoints have not swapped paths.
std::optional<ino_t> recorded_inode(const FileSystem& fs, const std::string& folder) {
  constexpr std::size_t kMaxNbytes = 32;
  const std::string text =
      read_begin(fs, join_path(folder, kExchangeName), kMaxNbytes).value_or("");
  ino_t inode = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), inode);
  const bool is_whole =
      error == std::errc() && std::string_view(end, text.data() + text.size()) == "\n";
  return is_whole ? std::optional(inode) : std::nullopt;
}

std::optional<std::string> text_of(const ResumeIdentity& identity, const std::string& name) {
  const auto found = identity.find(name);
  return found == identity.end() ? std::nullopt : std::optional(found->second);
}

/// Whether the main journal is still that of the work. Any other writer at the staging path
/// replaces it, so this tells also if the file system gives an inode number a second time. Work
/// that an earlier release began has no token; then the whole identities are compared.
bool is_journal_of_work(const FileSystem& fs, const std::string& staging_path,
                        const std::string& folder) {
  ResumeIdentity work = read_journal_head(fs, join_path(folder, kWorkName)).identity;
  const ResumeIdentity now =
      read_journal_head(fs, StagedDestination::journal_path_of(staging_path)).identity;
  const auto token = text_of(work, kToken);
  if (token) return text_of(now, kToken) == token;
  // `work` is damaged, which `identity` reports: only the main journal can tell.
  if (work.empty()) return now.empty() || text_of(now, kToken).has_value();
  work.erase(kNumShares);
  return now == work;
}

/// Whether the object at a staging path is that of shared work which has begun. After the new
/// checkpoint and the old one have swapped paths, it is the old one.
bool is_shared_work(const FileSystem& fs, const std::string& staging_path) {
  const std::string folder = staging_path + std::string(kSuffix);
  const auto named = status_of_name(folder);
  if (named && S_ISDIR(named->st_mode) && named->st_uid != ::geteuid() &&
      ::faccessat(AT_FDCWD, folder.c_str(), X_OK, AT_EACCESS) != 0 && errno == EACCES) {
    refuse_folder(folder, "a closed folder of another user");
  }
  if (!mode_of_name(join_path(folder, kWorkName))) return false;
  const auto inode = inode_of_name(staging_path);
  return inode && recorded_inode(fs, folder).value_or(*inode) == *inode &&
         is_journal_of_work(fs, staging_path, folder);
}

}  // namespace

std::optional<IdentityDifference> first_difference(const ResumeIdentity& before,
                                                   const ResumeIdentity& now) {
  const auto difference = [&](const std::string& name) -> std::optional<IdentityDifference> {
    const auto text_before = text_of(before, name);
    const auto text_now = text_of(now, name);
    if (text_before == text_now) return std::nullopt;
    return IdentityDifference{name, text_before.value_or("none"), text_now.value_or("none")};
  };
  ResumeIdentity all = before;
  all.insert(now.begin(), now.end());
  ResumeIdentity explanations;
  for (const auto& entry : all) {
    if (entry.first.starts_with(kPlanExplanation)) {
      explanations.insert(entry);
    } else if (entry.first != kPlanDigest && entry.first != kValuesDigest) {
      if (auto found = difference(entry.first)) return found;
    }
  }
  for (const char* digest : {kPlanDigest, kValuesDigest}) {
    const auto found = difference(digest);
    if (!found) continue;
    for (const auto& entry : explanations) {
      if (auto explained = difference(entry.first)) return explained;
    }
    return found;
  }
  return std::nullopt;
}

SharedWork::SharedWork(FileSystem& fs, const std::string& destination)
    : fs_(fs),
      destination_(without_trailing_slashes(destination)),
      path_(StagedDestination::staging_path_of(destination_) + std::string(kSuffix)) {}

bool SharedWork::is_begun() const {
  return is_shared_work(fs_, StagedDestination::staging_path_of(destination_));
}

bool SharedWork::is_begun_at(const FileSystem& fs, const std::string& path) {
  if (is_shared_work(fs, without_trailing_slashes(path))) return true;
  const auto kind = fs.kind_of(path);
  return kind && kind != FileKind::other && is_shared_work(fs, fs.resolve_links(path));
}

ResumeIdentity SharedWork::with_new_token(ResumeIdentity identity) {
  identity[kToken] = tessera::detail::random_name();
  return identity;
}

ResumeIdentity SharedWork::identity() const {
  ResumeIdentity identity = read_journal_head(fs_, path_in(kWorkName)).identity;
  if (identity.empty()) {
    throw Error::expected(ErrorKind::corruption, {.path = path_in(kWorkName)}, "shared work",
                          "the source and options of the workers", "none, so the file is damaged",
                          "discard the work of all workers");
  }
  identity.erase(kToken);  // of this run of the work, not of the move
  return identity;
}

int SharedWork::num_shares() const {
  const std::string text = text_of(identity(), kNumShares).value_or("");
  const int number = std::atoi(text.c_str());
  if (number < 1) {
    throw Error::expected(ErrorKind::corruption, {.path = path_in(kWorkName)}, kNumShares,
                          "1 or more", printable(text));
  }
  return number;
}

std::string SharedWork::command() const {
  require_own();
  return read_file(fs_, path_in(kCommandName), kMaxTextNbytes);
}

std::vector<std::string> SharedWork::names() const {
  try {
    return fs_.list_directory(path_);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::not_found) throw;
    return {};
  }
}

void SharedWork::require_own() const {
  const auto named = status_of_name(path_);
  if (!named) return;
  const auto refuse = [&](const std::string& found) { refuse_folder(path_, found); };
  if (!S_ISDIR(named->st_mode)) refuse(S_ISLNK(named->st_mode) ? "a link" : "a file");
  if (named->st_uid != ::geteuid()) refuse("a folder of another user");
  for (const std::string& name : names()) {
    if (!is_own_name(name)) refuse("a folder with another file, " + printable(name));
  }
}

FileDescriptor SharedWork::lock(const std::stop_token& stop) {
  const std::string path = path_in(kLockName);
  if (const std::string parent = directory_of(destination_);
      fs_.kind_of(parent) != FileKind::directory) {
    throw Error::expected(ErrorKind::io, {.path = destination_}, "destination",
                          "an existing folder to write into", "none at " + printable(parent));
  }
  for (;;) {
    try {
      fs_.make_directory(path_);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::already_exists) throw;
    }
    require_own();
    FileDescriptor file(tessera::detail::retry_on_interrupt(
        [&] { return ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666); }));
    if (!file) {
      if (errno == ENOENT) continue;  // another process has just removed the folder
      tessera::detail::throw_system_error(errno, path, "open");
    }
    LockResult result = tessera::detail::try_lock_between_hosts(file);
    while (result == LockResult::held_by_another) {
      if (stop.stop_requested() || CurrentStop::token().stop_requested()) {
        throw Error(ErrorKind::interrupted, {}, "interrupted");
      }
      std::this_thread::sleep_for(kPollInterval);
      result = tessera::detail::try_lock_between_hosts(file);
    }
    if (result == LockResult::unavailable) refuse_no_locks(path_);
    if (tessera::detail::is_still_at(file.get(), path)) return file;
  }
}

void SharedWork::clear() {
  fs_.remove_all(path_in(kWorkName));  // first: without `exchange`, it would describe other work
  for (const std::string& name : names()) {
    if (name != kLockName && !name.starts_with(kComparisonPrefix)) fs_.remove_all(path_in(name));
  }
}

void SharedWork::begin(const ResumeIdentity& identity, int num_shares, const std::string& command) {
  write_text(fs_, path_in(kCommandName), command);
  const std::string unfinished = path_in(std::string(kWorkName) + ".new");
  Journal(fs_, unfinished, with_num_shares(identity, num_shares)).sync();
  fs_.rename(unfinished, path_in(kWorkName));
  fs_.sync_directory(path_);
}

void SharedWork::require_same(const ResumeIdentity& identity, int num_shares) const {
  const auto difference = first_difference(this->identity(), with_num_shares(identity, num_shares));
  if (!difference) return;
  throw Error::expected(
      ErrorKind::mismatch, {.path = path_},
      "the workers' source or options differ: " + printable(difference->name),
      printable(difference->before), printable(difference->now),
      "all workers need the same command; to start again, discard the work of all workers");
}

std::string SharedWork::journal_path(int share) const {
  return path_in(std::string(kSharePrefix) + std::to_string(share));
}

bool SharedWork::has_done_text(const std::string& name) const {
  return read_begin(fs_, path_in(name), kDoneText.size()).value_or("").starts_with(kDoneText);
}

// Lists the folder instead of looking for each name: a network file system may remember for a while
// that a name did not exist.
std::vector<SharedWork::Incomplete> SharedWork::incomplete_shares() const {
  const std::vector<std::string> all = names();
  const auto has = [&](const std::string& name) { return std::ranges::binary_search(all, name); };
  std::vector<Incomplete> shares;
  const int number = num_shares();
  for (int share = 0; share < number; ++share) {
    const std::string name = last_component(journal_path(share));
    const std::string done = name + std::string(kDoneSuffix);
    if (has(done) && has_done_text(done)) continue;
    shares.push_back({share, has(name + ".lock") ? state_in_words(share) : "was never begun"});
  }
  return shares;
}

bool SharedWork::is_complete(int share) const {
  const std::string name = last_component(journal_path(share)) + std::string(kDoneSuffix);
  const std::vector<std::string> all = names();
  return std::ranges::find(all, name) != all.end() && has_done_text(name);
}

/// Returns the numbers of the shares that have a file in the folder. Does not need the file `work`,
/// which may be damaged.
std::set<int> SharedWork::named_shares() const {
  std::set<int> shares;
  for (const std::string& name : names()) {
    if (!name.starts_with(kSharePrefix)) continue;
    int share = 0;
    const char* const begin = name.data() + kSharePrefix.size();
    if (std::from_chars(begin, name.data() + name.size(), share).ec == std::errc()) {
      shares.insert(share);
    }
  }
  return shares;
}

std::string SharedWork::state_in_words(int share) const {
  if (!mode_of_name(journal_path(share) + ".lock")) return "was never begun";
  if (!try_lock_share(share)) {
    const std::string holder =
        read_begin(fs_, journal_path(share) + ".lock", kMaxTextNbytes).value_or("");
    return "is being written" + (holder.empty() ? "" : " by " + printable(holder));
  }
  return mode_of_name(journal_path(share)) ? "was interrupted" : "was never begun";
}

std::optional<FileDescriptor> SharedWork::try_lock_share(int share) const {
  return try_lock(journal_path(share) + ".lock");
}

std::string SharedWork::comparison_path(int share) const {
  return path_in(std::string(kComparisonPrefix) + std::to_string(share));
}

std::optional<FileDescriptor> SharedWork::try_lock_comparison(int share) const {
  return try_lock(comparison_path(share) + ".lock");
}

std::optional<std::string> SharedWork::read_comparison(int share, std::uint64_t max_nbytes) const {
  return read_begin(fs_, comparison_path(share), max_nbytes);
}

void SharedWork::refuse_while_compared() const {
  for (const std::string& name : names()) {
    if (!name.starts_with(kComparisonPrefix) || !name.ends_with(".lock")) continue;
    if (try_lock(path_in(name))) continue;
    throw Error(ErrorKind::already_exists, {.path = path_in(name)},
                "cannot remove the shared work: a worker is still comparing pieces with the base "
                "(wait until it ends)");
  }
}

void SharedWork::write_comparison(int share, const std::string& text) {
  const std::string path = comparison_path(share);
  const std::string unfinished = path + std::string(kNewSuffix);
  fs_.remove_all(unfinished);  // left by a process that died while it wrote the file
  fs_.remove_all(path);        // left by another move
  write_text(fs_, unfinished, text);
  fs_.rename(unfinished, path);
}

std::optional<FileDescriptor> SharedWork::try_lock(const std::string& path) const {
  FileDescriptor file = tessera::detail::open_file(path, O_RDWR | O_CREAT | O_NOFOLLOW);
  const LockResult result = tessera::detail::try_lock_between_hosts(file);
  if (result == LockResult::unavailable) refuse_no_locks(path_);
  if (result == LockResult::held_by_another) return std::nullopt;
  return file;
}

void SharedWork::name_holder(int share) {
  const std::string name = this_process();
  const auto file = fs_.open_for_update(journal_path(share) + ".lock");
  file->write_at(0, std::as_bytes(std::span(name)));
  file->resize(name.size());
  file->close();
}

void SharedWork::refuse_held(int share) const {
  // The file `work` may be damaged.
  const auto number = text_of(read_journal_head(fs_, path_in(kWorkName)).identity, kNumShares);
  throw Error(ErrorKind::already_exists, {.path = path_},
              "part " + std::to_string(share) + (number ? " of " + printable(*number) : "") + " " +
                  state_in_words(share) + " (only one worker may write a part)");
}

void SharedWork::mark_complete(int share, Mark mark) {
  const std::string path = journal_path(share) + std::string(kDoneSuffix);
  if (!has_done_text(last_component(path))) {
    fs_.remove_all(path);  // left by a process that died while it wrote the file
    write_text(fs_, path, std::string(kDoneText) + this_process() + "\n", mark);
  }
  if (mark == Mark::unsynced) return;
  try {
    fs_.sync_directory(path_);
  } catch (const Error&) {
    // No error if the folder is gone: another worker may have seen that all shares are complete,
    // and has finished the work.
    if (mode_of_name(path_)) throw;
  }
}

// Syncs the folder, so that after a power failure the share cannot be complete without its blocks.
void SharedWork::unmark_complete(int share) {
  fs_.remove_all(journal_path(share) + std::string(kDoneSuffix));
  fs_.sync_directory(path_);
}

JournalContents SharedWork::all_blocks() const {
  const std::string main_journal =
      StagedDestination::journal_path_of(StagedDestination::staging_path_of(destination_));
  const JournalHead head = read_journal_head(fs_, main_journal);
  JournalContents all;
  all.identity = head.identity;
  all.end_nbytes = head.identity_end_nbytes;
  const int number = num_shares();
  for (int share = 0; share < number; ++share) {
    auto blocks = read_journal(fs_, journal_path(share));
    if (blocks)
      all.entries.insert(all.entries.end(), blocks->entries.begin(), blocks->entries.end());
  }
  std::ranges::sort(all.entries, {}, &JournalContents::Entry::id);
  return all;
}

void SharedWork::begin_exchange() {
  const auto inode = inode_of_name(StagedDestination::staging_path_of(destination_));
  TESSERA_CHECK(inode.has_value());
  fs_.remove_all(path_in(kExchangeName));  // left by a process that died before the exchange
  write_text(fs_, path_in(kExchangeName), std::to_string(*inode) + "\n");
  fs_.sync_directory(path_);
}

void SharedWork::undo_exchange() noexcept {
  try {
    fs_.remove_all(path_in(kExchangeName));
  } catch (...) {
    // Ignored: while the staging path stays the same object, the file does no harm.
  }
}

/// Whether the new checkpoint has left the staging path, but is not at the destination.
bool SharedWork::is_result_missing() const {
  if (is_begun() || !mode_of_name(path_in(kWorkName))) return false;
  const auto inode = recorded_inode(fs_, path_);
  return inode && inode_of_name(destination_) != inode;
}

void SharedWork::remove_replaced() {
  try {
    StagedDestination::finish_exchange(fs_, destination_, DestinationKind::directory);
    if (StagedDestination::left_over_at(fs_, destination_)) {
      StagedDestination::remove_left_over(fs_, destination_);
    }
    // A worker may have died when it had removed the replaced checkpoint, or had moved the new one
    // to the destination, and not yet removed the journal.
    const std::string staging_path = StagedDestination::staging_path_of(destination_);
    const std::string journal = StagedDestination::journal_path_of(staging_path);
    const auto token = text_of(read_journal_head(fs_, path_in(kWorkName)).identity, kToken);
    if (token && !mode_of_name(staging_path) &&
        text_of(read_journal_head(fs_, journal).identity, kToken) == token) {
      fs_.remove_all(journal);
    }
  } catch (const Error&) {
    // Ignored, because the destination is complete. The replaced checkpoint may hold a file of
    // another program.
  }
}

void SharedWork::clean_up() {
  if (is_result_missing()) {
    throw Error::expected(ErrorKind::mismatch, {.path = destination_}, "shared work",
                          "the new checkpoint here or at " +
                              printable(StagedDestination::staging_path_of(destination_)) +
                              ", between which a worker moved it and died",
                          "other objects, which were made later", Remedy{Remedy::Action::discard});
  }
  remove_replaced();
  remove();
}

void SharedWork::remove() {
  // Remove the file `work` first: without it, no process takes the other files for shared work.
  // Remove `lock` last: as soon as it is gone, another process may lock a new one and begin its own
  // work in the folder.
  fs_.remove_all(path_in(kWorkName));
  try {
    for (const std::string& name : names()) {
      if (name != kLockName) fs_.remove_all(path_in(name));
    }
    fs_.remove_all(path_in(kLockName));
  } catch (const Error&) {
    return;  // the next process that locks the folder will find no work, and remove the rest
  }
  // Fails if another process has made a new lock. That process removes the folder later.
  ::rmdir(path_.c_str());
}

void SharedWork::remove_ended() {
  if (!mode_of_name(path_) || is_begun()) return;
  std::optional<FileDescriptor> whole;
  try {
    require_own();
    whole = try_lock(path_in(kLockName));
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::interrupted) throw;
    return;  // not ours, or just removed by another process: the writer does without the folder
  }
  if (!whole || !tessera::detail::is_still_at(whole->get(), path_in(kLockName)) || is_begun()) {
    return;
  }
  const bool is_compared = std::ranges::any_of(
      names(), [](const std::string& name) { return name.starts_with(kComparisonPrefix); });
  is_compared ? clear() : remove();
}

void SharedWork::discard() {
  if (!mode_of_name(path_)) return;
  const FileDescriptor whole = lock();
  refuse_while_compared();
  if (!is_begun()) {
    if (!is_result_missing()) remove_replaced();
    remove();
    return;
  }
  std::vector<FileDescriptor> shares;
  for (const int share : named_shares()) {
    auto held = try_lock_share(share);
    if (!held) refuse_held(share);
    shares.push_back(std::move(*held));
  }
  fs_.remove_all(path_in(kWorkName));
  StagedDestination::remove_left_over(fs_, destination_);
  remove();
}

}  // namespace tessera::formats
