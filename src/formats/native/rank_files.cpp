#include "formats/native/rank_files.h"

#include <utility>

#include "formats/native/checksum_text.h"
#include "formats/open_files.h"
#include "tessera/base/error.h"

namespace tessera::formats::native {
namespace {

/// Returns the ranks as text, `0, 3, 7`. Lists at most ten, and says how many more there are.
std::string list_ranks(const std::vector<std::int64_t>& ranks) {
  constexpr std::size_t kMaxListed = 10;
  std::string text;
  for (std::size_t i = 0; i < ranks.size() && i < kMaxListed; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  if (ranks.size() > kMaxListed) {
    text += " and " + std::to_string(ranks.size() - kMaxListed) + " more";
  }
  return text;
}

}  // namespace

std::unique_ptr<ReadableFile> open_rank_file(const FileSystem& fs,
                                             const std::string& checkpoint_path, std::int64_t rank,
                                             std::uint64_t checkpoint_id,
                                             const std::vector<RankFileRecord>& records) {
  const std::string path = join_path(checkpoint_path, rank_file_name(rank));
  if (!fs.kind_of(path)) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, "rank file", "a file", "none",
                          "incomplete copy?");
  }
  require_contained(fs, checkpoint_path, rank_file_name(rank));
  auto file = open_kept(fs, path);
  const RankFileRecord& record = records[static_cast<std::size_t>(rank)];
  const FileHeader header = read_header(*file);
  require_rank_role(header, path, rank, static_cast<std::int64_t>(records.size()));
  if (header.checkpoint_id != checkpoint_id) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, "checkpoint id",
                          checksum_text(checkpoint_id), checksum_text(header.checkpoint_id),
                          "from another checkpoint?");
  }
  if (header.file_nbytes != record.nbytes || header.index_checksum != record.index_checksum ||
      header.structure_checksum != record.structure_checksum) {
    throw Error(ErrorKind::corruption, {.path = path}, "header: contradicts the index");
  }
  return file;
}

RankFileIndex read_rank_file_index(const FileSystem& fs, const std::string& checkpoint_path,
                                   std::int64_t rank, std::int64_t world_size) {
  const std::string path = join_path(checkpoint_path, rank_file_name(rank));
  require_contained(fs, checkpoint_path, rank_file_name(rank));
  const auto file = fs.open(path);
  const FileHeader header = read_header(*file);
  require_rank_role(header, path, rank, world_size);
  return {header, decode_index(read_index_bytes(*file, header), header, path)};
}

void require_rank_files(const FileSystem& fs, const std::string& checkpoint_path,
                        std::int64_t world_size, std::string_view likely_cause) {
  std::vector<std::int64_t> missing;
  for (std::int64_t rank = 0; rank < world_size; ++rank) {
    if (!fs.kind_of(join_path(checkpoint_path, rank_file_name(rank)))) missing.push_back(rank);
  }
  if (missing.empty()) return;
  throw Error::expected(ErrorKind::corruption, {.path = checkpoint_path}, "rank files",
                        std::to_string(world_size) + " of them",
                        "none for rank " + list_ranks(missing), likely_cause);
}

RankFiles::RankFiles(const FileSystem& fs, std::string checkpoint_path, std::uint64_t checkpoint_id,
                     const std::vector<RankFileRecord>& records)
    : fs_(fs),
      checkpoint_path_(std::move(checkpoint_path)),
      checkpoint_id_(checkpoint_id),
      records_(records),
      files_(records.size()) {}

const ReadableFile& RankFiles::open(std::int64_t rank) const {
  const std::lock_guard lock(mutex_);
  auto& file = files_[static_cast<std::size_t>(rank)];
  if (!file) file = open_rank_file(fs_, checkpoint_path_, rank, checkpoint_id_, records_);
  return *file;
}

}  // namespace tessera::formats::native
