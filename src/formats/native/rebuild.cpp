#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "formats/native/checksum_text.h"
#include "formats/native/index_file.h"
#include "tessera/base/digest.h"
#include "tessera/base/error.h"
#include "tessera/formats/native.h"

namespace tessera::formats {
namespace native {
namespace {

/// Returns the ranks, `0, 3, 7`, at most ten of them by number.
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

/// Returns the number of ranks that the checkpoint's rank files speak of.
std::int64_t world_size_of(const FileSystem& fs, const std::string& path) {
  for (const std::string& name : fs.list_directory(path)) {
    if (!name.starts_with("rank-") || !name.ends_with(".h5")) continue;
    require_contained(fs, path, name);
    const auto file = fs.open(join_path(path, name));
    return read_header(*file).world_size;
  }
  throw Error::expected(ErrorKind::corruption, {.path = path}, "rank files", "at least one", "none",
                        "no native checkpoint?");
}

}  // namespace
}  // namespace native

void rebuild_native_index(FileSystem& fs, const std::string& path) {
  using namespace native;
  const std::int64_t world_size = world_size_of(fs, path);
  std::vector<std::int64_t> missing;
  for (std::int64_t rank = 0; rank < world_size; ++rank) {
    if (!fs.kind_of(join_path(path, rank_file_name(rank)))) missing.push_back(rank);
  }
  if (!missing.empty()) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, "rank files",
                          std::to_string(world_size) + " of them",
                          "none for rank " + list_ranks(missing), "incomplete copy?");
  }

  std::vector<Index> ranks;
  std::vector<RankFileRecord> records;
  std::uint64_t checkpoint_id = 0;
  for (std::int64_t rank = 0; rank < world_size; ++rank) {
    const std::string rank_path = join_path(path, rank_file_name(rank));
    require_contained(fs, path, rank_file_name(rank));
    const auto file = fs.open(rank_path);
    const FileHeader header = read_header(*file);
    require_rank_role(header, rank_path, rank, world_size);
    if (rank == 0) checkpoint_id = header.checkpoint_id;
    if (header.checkpoint_id != checkpoint_id) {
      throw Error::expected(ErrorKind::corruption, {.path = rank_path}, "checkpoint id",
                            checksum_text(checkpoint_id), checksum_text(header.checkpoint_id),
                            "from another checkpoint than rank 0?");
    }
    ranks.push_back(decode_index(read_index_bytes(*file, header), header, rank_path));
    records.push_back({header.file_nbytes, header.index_checksum, header.structure_checksum});
  }
  Index whole = merge_ranks(std::move(ranks), path);
  whole.rank_files = std::move(records);
  const std::uint64_t rebuilt_id = xxh3_64(encode_index(whole));
  if (rebuilt_id != checkpoint_id) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, "checkpoint id",
                          checksum_text(checkpoint_id), checksum_text(rebuilt_id),
                          "rank files that contradict each other");
  }
  StagedDestination staged(fs, join_path(path, kIndexFileName), DestinationKind::file,
                           OverwritePolicy::replace);
  write_index_file(fs, staged.staging_path(), whole);
  staged.commit();
}

}  // namespace tessera::formats
