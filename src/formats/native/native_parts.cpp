#include "formats/native/native_parts.h"

#include <span>
#include <utility>

#include "base/digest.h"
#include "formats/native/checksum_text.h"
#include "formats/native/rank_file.h"
#include "formats/native/rank_files.h"
#include "tessera/base/error.h"

namespace tessera::formats::native {
namespace {

/// Returns the encoded index without the places of the pieces that are in rank files, and without
/// the patches themselves, because a rank knows only the changed rows of its own pieces.
std::vector<std::byte> encode_without_places(Index index) {
  for (std::size_t t = 0; t < index.storage.num_tensors(); ++t) {
    for (std::size_t p = 0; p < index.storage.num_pieces(t); ++p) {
      const StoredPiece stored = index.stored({t, p});
      if (stored.file == 0) index.storage.set({t, p}, {.position = stored.position});
    }
  }
  for (auto& [id, patch] : index.patches) patch = {};
  return encode_index(index);
}

}  // namespace

RankFileIndex read_part(const FileSystem& fs, const std::string& directory, std::int64_t rank,
                        Index expected, std::int64_t world_size, std::string_view likely_cause) {
  RankFileIndex found = read_rank_file_index(fs, directory, rank, world_size);
  if (found.index.format_version != expected.format_version ||
      encode_without_places(found.index) != encode_without_places(std::move(expected))) {
    throw Error::expected(ErrorKind::corruption,
                          {.path = join_path(directory, rank_file_name(rank))}, "part",
                          "the contents, values and options of rank 0",
                          "other contents, values or options", likely_cause);
  }
  return found;
}

std::uint64_t join_parts(const FileSystem& fs, const std::string& directory,
                         CheckpointContents contents, const std::vector<Value>& values,
                         const NativeWriteOptions& options) {
  Index whole = describe_checkpoint(std::move(contents), values, options, directory);
  const auto pieces = pieces_by_rank(whole.contents);
  const auto world_size = static_cast<std::int64_t>(pieces.size());
  require_rank_files(fs, directory, world_size, "did one rank not finish its part?");
  for (std::int64_t rank = 0; rank < world_size; ++rank) {
    const auto own_pieces = pieces[static_cast<std::size_t>(rank)];
    const RankFileIndex found = read_part(fs, directory, rank, select_pieces(whole, own_pieces),
                                          world_size, "did the ranks write different checkpoints?");
    take_storage(whole, own_pieces, found.index);
    whole.rank_files.push_back(found.record());
  }
  return xxh3_64(encode_index(whole));
}

void seal_part(FileSystem& fs, const std::string& directory, int rank, std::uint64_t token) {
  const std::string path = join_path(directory, rank_file_name(rank));
  FileHeader header = read_header(*fs.open(path));
  require_rank_role(header, path, rank, header.world_size);
  if (header.checkpoint_id != kUnsealedId) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, "checkpoint id",
                          "none in an unfinished part", checksum_text(header.checkpoint_id));
  }
  header.checkpoint_id = token;
  write_header(fs, path, header);
}

}  // namespace tessera::formats::native
