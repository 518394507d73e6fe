#include "tessera/formats/base_checkpoint.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <utility>

#include "base/file_descriptor.h"
#include "object_store/url.h"
#include "tessera/base/error.h"
#include "tessera/formats/format_driver.h"
#include "tessera/formats/format_writer.h"

namespace tessera::formats {
namespace {

/// Returns the path with its links resolved. If nothing exists at `path`, resolves only its parent
/// directory; if that does not exist either, returns `path` unchanged.
std::string resolved_path(const FileSystem& fs, const std::string& path) {
  if (fs.kind_of(path)) return fs.resolve_links(path);
  const std::string parent = directory_of(path);
  return fs.kind_of(parent) ? join_path(fs.resolve_links(parent), last_component(path)) : path;
}

dev_t device_of(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) tessera::detail::throw_system_error(errno, path, "stat");
  return status.st_dev;
}

}  // namespace

std::shared_ptr<const BaseCheckpoint> BaseCheckpoint::open(const FileSystem& fs,
                                                           const std::string& path, Format format) {
  if (object_store::is_url(path)) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = path}, "base", "a local path",
                          "a URL", "hard links need the file system of the destination");
  }
  auto base = writer_of(format).open_base(fs, path);
  if (base) return base;
  throw Error::expected(
      ErrorKind::unsupported, {.path = path}, "format of a checkpoint with a base",
      writable_formats_in_words([](const FormatTraits& of) { return of.has_base; }), format.name());
}

std::vector<PiecePair> pair_pieces(const CheckpointContents& contents,
                                   const CheckpointContents& base) {
  std::vector<PiecePair> pairs;
  for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
    const TensorEntry& tensor = contents.tensors[t];
    const TensorEntry* const of_base = base.find_tensor(tensor.meta.fqn);
    if (of_base == nullptr || of_base->meta != tensor.meta || of_base->kind != tensor.kind) {
      continue;
    }
    const auto base_index = static_cast<std::size_t>(of_base - base.tensors.data());
    std::map<Region, std::size_t> regions;
    for (std::size_t p = 0; p < of_base->pieces.size(); ++p) {
      regions.emplace(of_base->pieces[p].region, p);
    }
    for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
      const auto found = regions.find(tensor.pieces[p].region);
      if (found == regions.end() || numel_of(tensor.pieces[p].region) == 0) continue;
      pairs.push_back({{t, p}, {base_index, found->second}});
    }
  }
  return pairs;
}

std::shared_ptr<const LinkedPieces> link_pieces(std::shared_ptr<const BaseCheckpoint> base,
                                                const CheckpointContents& contents,
                                                PieceMatches matches) {
  auto linked = std::make_shared<LinkedPieces>();
  linked->pairs = base->worth_linking(std::move(matches.pairs));
  if (linked->pairs.empty()) return nullptr;
  linked->base = std::move(base);
  for (const PiecePair& pair : linked->pairs) {
    auto changed = matches.changed_rows.extract(pair.piece);
    if (!changed.empty()) linked->changed_rows.insert(std::move(changed));
    linked->nbytes += linked_nbytes_of(*linked, contents, pair.piece);
  }
  return linked;
}

std::uint64_t linked_nbytes_of(const LinkedPieces& linked, const CheckpointContents& contents,
                               CheckpointWriter::PieceId piece) {
  const TensorEntry& tensor = contents.tensors[piece.tensor_index];
  const Region& region = tensor.pieces[piece.piece_index].region;
  const std::uint64_t nbytes = nbytes_of(region, tensor.meta.dtype);
  const auto changed = linked.changed_rows.find(piece);
  if (changed == linked.changed_rows.end()) return nbytes;
  const auto rows = rows_of(region, tensor.meta);
  return nbytes - static_cast<std::uint64_t>(changed->second.count()) * rows->row_nbytes;
}

void check_base(const FileSystem& fs, const std::string& base, const std::string& destination) {
  const std::string from = resolved_path(fs, base) + "/";
  const std::string to = resolved_path(fs, without_trailing_slashes(destination)) + "/";
  if (from.starts_with(to) || to.starts_with(from)) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = base}, "base",
                          "another checkpoint than the destination",
                          from == to             ? "the destination itself"
                          : from.starts_with(to) ? "a path inside the destination"
                                                 : "a folder that contains the destination");
  }
  const std::string parent = directory_of(without_trailing_slashes(destination));
  if (fs.kind_of(parent) && device_of(base) != device_of(parent)) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = base}, "base",
                          "a checkpoint on the file system of the destination",
                          "a checkpoint on another file system",
                          "hard links cannot cross file systems; without a base, "
                          "all pieces are written");
  }
}

}  // namespace tessera::formats
