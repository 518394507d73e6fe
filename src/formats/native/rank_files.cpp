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

/// Opens a file of the checkpoint, which must exist and be inside the checkpoint.
std::unique_ptr<ReadableFile> open_member(const FileSystem& fs, const std::string& checkpoint_path,
                                          const std::string& name, std::string_view rule) {
  const std::string path = join_path(checkpoint_path, name);
  if (!fs.kind_of(path)) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, rule, "a file", "none",
                          "incomplete copy?");
  }
  require_contained(fs, checkpoint_path, name);
  return open_kept(fs, path);
}

/// Throws Error(corruption) unless the header has the numbers that the index records.
void require_record(const FileHeader& header, std::uint64_t checkpoint_id,
                    const RankFileRecord& record, const std::string& path) {
  if (header.checkpoint_id != checkpoint_id) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, "checkpoint id",
                          checksum_text(checkpoint_id), checksum_text(header.checkpoint_id),
                          "from another checkpoint?");
  }
  if (header.file_nbytes != record.nbytes || header.index_checksum != record.index_checksum ||
      header.structure_checksum != record.structure_checksum) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, "header",
                          "the size and the checksums that the index records", "others",
                          "damaged, or not copied together with the index?");
  }
}

}  // namespace

std::unique_ptr<ReadableFile> open_rank_file(const FileSystem& fs,
                                             const std::string& checkpoint_path, std::int64_t rank,
                                             std::uint64_t checkpoint_id,
                                             const std::vector<RankFileRecord>& records) {
  auto file = open_member(fs, checkpoint_path, rank_file_name(rank), "rank file");
  const FileHeader header = read_header(*file);
  require_rank_role(header, file->path(), rank, static_cast<std::int64_t>(records.size()));
  require_record(header, checkpoint_id, records[static_cast<std::size_t>(rank)], file->path());
  return file;
}

std::unique_ptr<ReadableFile> open_linked_file(const FileSystem& fs,
                                               const std::string& checkpoint_path,
                                               const LinkedFile& linked) {
  auto file = open_member(fs, checkpoint_path, linked.name(), "file of the base");
  const FileHeader header = read_header(*file);
  require_rank_role(header, file->path(), linked.rank, linked.world_size);
  require_record(header, linked.checkpoint_id, linked.record, file->path());
  if (header.version != linked.format_version) {
    throw Error::expected(ErrorKind::corruption, {.path = file->path()}, "format version",
                          std::to_string(linked.format_version), std::to_string(header.version));
  }
  return file;
}

std::string file_name_of(const Index& index, std::int64_t rank, const StoredPiece& stored) {
  return stored.file == 0 ? rank_file_name(rank) : index.linked_files[stored.file - 1].name();
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

RankFileIndex read_linked_file_index(const FileSystem& fs, const std::string& checkpoint_path,
                                     const LinkedFile& linked) {
  const auto file = open_linked_file(fs, checkpoint_path, linked);
  const FileHeader header = read_header(*file);
  return {header, decode_index(read_index_bytes(*file, header), header, file->path())};
}

void require_rank_files(const FileSystem& fs, const std::string& checkpoint_path,
                        std::int64_t world_size, std::string_view likely_cause) {
  std::vector<std::int64_t> missing;
  for (std::int64_t rank = 0; rank < world_size; ++rank) {
    if (!fs.kind_of(join_path(checkpoint_path, rank_file_name(rank)))) missing.push_back(rank);
  }
  if (missing.empty()) return;
  throw Error::expected(ErrorKind::corruption, {.path = checkpoint_path}, "rank files",
                        std::to_string(world_size) + " files",
                        "none for rank " + list_ranks(missing), likely_cause);
}

RankFiles::RankFiles(const FileSystem& fs, std::string checkpoint_path, std::uint64_t checkpoint_id,
                     const Index& index)
    : fs_(fs),
      checkpoint_path_(std::move(checkpoint_path)),
      checkpoint_id_(checkpoint_id),
      index_(index),
      files_(index.rank_files.size() + index.linked_files.size()) {}

const ReadableFile& RankFiles::open(std::int64_t rank, const StoredPiece& stored) const {
  const std::lock_guard lock(mutex_);
  if (stored.file != 0) {
    auto& file = files_[index_.rank_files.size() + stored.file - 1];
    if (!file) {
      file = open_linked_file(fs_, checkpoint_path_, index_.linked_files[stored.file - 1]);
    }
    return *file;
  }
  auto& file = files_[static_cast<std::size_t>(rank)];
  if (!file) file = open_rank_file(fs_, checkpoint_path_, rank, checkpoint_id_, index_.rank_files);
  return *file;
}

}  // namespace tessera::formats::native
