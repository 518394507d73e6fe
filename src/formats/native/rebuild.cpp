#include <sys/stat.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/named_object.h"
#include "base/outside_failure.h"
#include "formats/native/checksum_text.h"
#include "formats/native/index_file.h"
#include "formats/native/rank_files.h"
#include "formats/staging/staged_destination.h"
#include "tessera/base/error.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/native.h"

namespace tessera::formats {
namespace native {
namespace {

/// The usable ranks, and why the others are not usable.
struct RankIndexes {
  std::int64_t world_size = 0;
  std::uint64_t checkpoint_id = 0;  // of the first usable rank
  std::vector<Index> ranks{};       // the indexes of the usable ranks, in order
  std::vector<RankFileRecord> records{};
  std::vector<std::string> refusals{};  // why other ranks are not usable, one line each
};

/// Returns the world size in the first rank file header that can be read.
std::int64_t world_size_of(const FileSystem& fs, const std::string& path) {
  std::optional<Error> refusal;
  for (const std::string& name : fs.list_directory(path)) {
    if (!name.starts_with("rank-") || !name.ends_with(".h5")) continue;
    try {
      require_contained(fs, path, name);
      return read_header(*fs.open(join_path(path, name))).world_size;
    } catch (const Error& error) {
      if (tessera::detail::is_outside_failure(error)) throw;
      if (!refusal) refusal = error;
    }
  }
  if (refusal) throw *refusal;
  throw Error::expected(ErrorKind::corruption, {.path = path}, "rank files", "at least one", "none",
                        "is this a native checkpoint?");
}

/// Reads one rank's index. Throws: Error(corruption) if it contradicts the ranks that were added
/// before.
void add_rank(const FileSystem& fs, const std::string& path, std::int64_t rank,
              RankIndexes& indexes) {
  const std::string file_path = join_path(path, rank_file_name(rank));
  if (!fs.kind_of(file_path)) {
    throw Error::expected(ErrorKind::corruption, {.path = file_path}, "rank file", "a file", "none",
                          "incomplete copy?");
  }
  RankFileIndex file = read_rank_file_index(fs, path, rank, indexes.world_size);
  const std::uint64_t id = file.header.checkpoint_id;
  const auto fail = [&](std::string_view expected, std::string_view found,
                        std::string_view likely_cause) {
    throw Error::expected(ErrorKind::corruption, {.path = file_path}, "checkpoint id", expected,
                          found, likely_cause);
  };
  if (id == kUnsealedId) fail("an id", "none", "was the save interrupted?");
  if (indexes.ranks.empty()) indexes.checkpoint_id = id;
  if (id != indexes.checkpoint_id) {
    fail(checksum_text(indexes.checkpoint_id), checksum_text(id),
         "is it from another checkpoint than the rank files before it?");
  }
  if (!indexes.ranks.empty() && file.header.version != indexes.ranks.front().format_version) {
    throw Error::expected(ErrorKind::corruption, {.path = file_path}, "format version",
                          std::to_string(indexes.ranks.front().format_version),
                          std::to_string(file.header.version),
                          "is it from another checkpoint than the rank files before it?");
  }
  indexes.records.push_back(file.record());
  indexes.ranks.push_back(std::move(file.index));
}

RankIndexes read_ranks(const FileSystem& fs, const std::string& path) {
  RankIndexes indexes{.world_size = world_size_of(fs, path)};
  for (std::int64_t rank = 0; rank < indexes.world_size; ++rank) {
    try {
      add_rank(fs, path, rank, indexes);
    } catch (const Error& error) {
      if (tessera::detail::is_outside_failure(error)) throw;
      indexes.refusals.push_back(error.what());
    }
  }
  return indexes;
}

/// Returns a line for each tensor that the usable ranks name but do not hold completely.
std::vector<std::string> lost_elements(const std::vector<Index>& ranks) {
  struct Held {
    std::int64_t numel = 0;
    std::set<Region> regions{};  // replicas count once
  };
  std::map<std::string, Held> held;
  for (const Index& rank : ranks) {
    for (const TensorEntry& tensor : rank.contents->tensors) {
      Held& entry = held[tensor.meta.fqn];
      entry.numel = tensor.meta.numel();
      for (const Piece& piece : tensor.pieces) entry.regions.insert(piece.region);
    }
  }
  std::vector<std::string> lines;
  for (const auto& [fqn, entry] : held) {
    std::int64_t numel = 0;
    for (const Region& region : entry.regions) numel += numel_of(region);
    if (numel >= entry.numel) continue;
    lines.push_back("lost: " + std::to_string(entry.numel - numel) + " of " +
                    std::to_string(entry.numel) + " elements of " + printable(fqn));
  }
  return lines;
}

void add_lines(const std::vector<std::string>& lines, std::string& list) {
  constexpr std::size_t kMaxLines = 20;
  for (std::size_t i = 0; i < std::min(lines.size(), kMaxLines); ++i) list += lines[i] + "\n";
  if (lines.size() > kMaxLines) {
    list += "and " + std::to_string(lines.size() - kMaxLines) + " more\n";
  }
}

[[noreturn]] void refuse_loss(const std::string& path, const RankIndexes& indexes) {
  std::string list;
  add_lines(indexes.refusals, list);
  add_lines(lost_elements(indexes.ranks), list);
  list += "also lost: tensors and values that are only in the unusable files";
  throw Error::listing(ErrorKind::corruption, {.path = path},
                       "rank files: expected " + std::to_string(indexes.world_size) +
                           " files that belong together, found " +
                           std::to_string(indexes.ranks.size()),
                       list);
}

/// Whether a file may be an index: complete, damaged, or unfinished. An unfinished index begins
/// with zeros, because its header is written last.
bool may_be_index(const FileSystem& fs, const std::string& path) {
  // Compares only the first bytes of the magic number. Its other bytes change if the file was
  // transferred as text; the file is then a damaged index, but still an index.
  constexpr std::size_t kNameNbytes = 4;
  const std::string header = read_begin(fs, path, kHeaderNbytes).value_or("");
  const bool is_begun = header.find_first_not_of('\0') == std::string::npos;
  const std::string_view name(reinterpret_cast<const char*>(kMagic.data()), kNameNbytes);
  return is_begun || header.starts_with(name);
}

/// Decides whether a file at the staging path of an index may be removed: only if it may be an
/// index. (If a process died just after it swapped a new index with the old, the old one is there.)
StagedDestination::LeftOver judge_left_over(const FileSystem& fs, const StagedDestination& staged) {
  return may_be_index(fs, staged.staging_path()) ? StagedDestination::LeftOver::remove
                                                 : StagedDestination::LeftOver::foreign;
}

/// Throws if something that is not an index has the index's name: it must not be replaced.
void require_replaceable_index(const FileSystem& fs, const std::string& path) {
  const auto mode = tessera::detail::mode_of_name(path);
  if (!mode || (S_ISREG(*mode) && may_be_index(fs, path))) return;
  throw Error(ErrorKind::already_exists, {.path = path},
              "index: expected an index or an unused name, found " +
                  std::string(tessera::detail::kind_in_words(*mode)) + " (remove or rename it)");
}

}  // namespace
}  // namespace native

void rebuild_native_index(FileSystem& fs, const std::string& path) {
  using namespace native;
  const auto kind = fs.kind_of(path);
  if (kind != FileKind::directory) {
    throw Error::expected(ErrorKind::not_found, {.path = path}, "native checkpoint", "a directory",
                          !kind ? "nothing" : "a file",
                          !kind ? "" : "is it a checkpoint of another format?");
  }
  require_no_work_in_progress(fs, path);
  const std::string index_path = join_path(path, kIndexFileName);
  require_replaceable_index(fs, index_path);
  RankIndexes indexes = read_ranks(fs, path);
  if (!indexes.refusals.empty()) refuse_loss(path, indexes);
  Index whole = merge_ranks(std::move(indexes.ranks), path);
  for (const LinkedFile& file : whole.linked_files) open_linked_file(fs, path, file);
  whole.rank_files = std::move(indexes.records);
  const std::uint64_t rebuilt_id = xxh3_64(encode_index(whole));
  if (rebuilt_id != indexes.checkpoint_id) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, "checkpoint id",
                          checksum_text(indexes.checkpoint_id), checksum_text(rebuilt_id),
                          "the rank files contradict each other");
  }
  StagedDestination staged(fs, index_path, DestinationKind::member_file, OverwritePolicy::replace,
                           [&](const auto& left) { return judge_left_over(fs, left); });
  write_index_file(fs, staged.staging_path(), whole);
  staged.commit();
}

}  // namespace tessera::formats
