#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/native/checksum_text.h"
#include "formats/native/index_file.h"
#include "formats/native/rank_files.h"
#include "tessera/base/digest.h"
#include "tessera/base/error.h"
#include "tessera/formats/native.h"

namespace tessera::formats {
namespace native {
namespace {

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
  require_rank_files(fs, path, world_size, "incomplete copy?");

  std::vector<Index> ranks;
  std::vector<RankFileRecord> records;
  std::uint64_t checkpoint_id = 0;
  for (std::int64_t rank = 0; rank < world_size; ++rank) {
    RankFileIndex file = read_rank_file_index(fs, path, rank, world_size);
    const std::uint64_t id = file.header.checkpoint_id;
    const auto fail = [&](std::string_view expected, std::string_view found,
                          std::string_view likely_cause) {
      throw Error::expected(ErrorKind::corruption, {.path = join_path(path, rank_file_name(rank))},
                            "checkpoint id", expected, found, likely_cause);
    };
    if (id == kUnsealedId) fail("one", "none", "writing that was never finished?");
    if (rank == 0) checkpoint_id = id;
    if (id != checkpoint_id) {
      fail(checksum_text(checkpoint_id), checksum_text(id), "from another checkpoint than rank 0?");
    }
    records.push_back(file.record());
    ranks.push_back(std::move(file.index));
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
