#include "formats/native/native_base.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <set>
#include <system_error>
#include <utility>
#include <vector>

#include "base/outside_failure.h"
#include "formats/native/checksum_text.h"
#include "formats/native/native_checkpoint.h"
#include "formats/native/piece_places.h"
#include "formats/native/rank_files.h"
#include "tessera/base/error.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats::native {
namespace {

/// A file is linked only if the new checkpoint uses at least 1/kMaxGrowth of its bytes.
constexpr std::uint64_t kMaxGrowth = 2;

class NativeBase final : public BaseCheckpoint {
 public:
  explicit NativeBase(std::unique_ptr<NativeCheckpoint> checkpoint)
      : checkpoint_(std::move(checkpoint)) {}

  const CheckpointReader& reader() const override { return *checkpoint_; }
  const NativeCheckpoint& checkpoint() const { return *checkpoint_; }
  std::string identity() const override { return checksum_text(checkpoint_->checkpoint_id()); }
  std::vector<PiecePair> worth_linking(std::vector<PiecePair> pairs) const override;
  void read_unpatched(PieceId id, FlatRange range, std::span<std::byte> out) const override {
    checkpoint_->read_unpatched(id, range, out);
  }

  StoredPiece stored(PieceId id) const { return checkpoint_->index().stored(id); }
  /// Describes the file that holds a piece of the base, as an item for Index::linked_files.
  LinkedFile file_of(PieceId id) const;

 private:
  std::unique_ptr<NativeCheckpoint> checkpoint_;
};

LinkedFile NativeBase::file_of(PieceId id) const {
  const Index& index = checkpoint_->index();
  const StoredPiece place = stored(id);
  if (place.file != 0) return index.linked_files[place.file - 1];
  const int rank = index.contents->tensors[id.tensor_index].pieces[id.piece_index].rank;
  return {.checkpoint_id = checkpoint_->checkpoint_id(),
          .rank = static_cast<std::uint32_t>(rank),
          .world_size = static_cast<std::uint32_t>(index.contents->world_size),
          .format_version = index.format_version,
          .chunk_nbytes = index.chunk_nbytes,
          .record = index.rank_files[static_cast<std::size_t>(rank)]};
}

std::vector<PiecePair> NativeBase::worth_linking(std::vector<PiecePair> pairs) const {
  struct Use {
    std::uint64_t file_nbytes = 0;
    std::uint64_t used_nbytes = 0;
    std::set<std::uint64_t> begins{};  // of used pieces: replicas may share one piece of the base
  };
  std::map<std::string, Use> uses;
  for (const PiecePair& pair : pairs) {
    const LinkedFile file = file_of(pair.base_piece);
    Use& use = uses[file.name()];
    use.file_nbytes = file.record.nbytes;
    if (use.begins.insert(stored(pair.base_piece).begin).second) {
      use.used_nbytes += stored(pair.base_piece).stored_nbytes;
    }
  }
  std::erase_if(pairs, [&](const PiecePair& pair) {
    const Use& use = uses.at(file_of(pair.base_piece).name());
    return use.used_nbytes < (use.file_nbytes + kMaxGrowth - 1) / kMaxGrowth;
  });
  return pairs;
}

const NativeBase& native_base(const LinkedPieces& linked) {
  const auto* const base = dynamic_cast<const NativeBase*>(linked.base.get());
  TESSERA_CHECK(base != nullptr);
  return *base;
}

/// Returns one place per piece of the base, by tensor. Index::linked_places says what a place is.
std::vector<std::vector<std::uint64_t>> places_in(const Index& base) {
  std::vector<std::vector<std::uint64_t>> places;
  PiecePlaces finder(base);
  for (std::size_t t = 0; t < base.contents->tensors.size(); ++t) {
    places.push_back(finder.next_tensor());
  }
  return places;
}

[[noreturn]] void refuse_removed(const std::string& path) {
  throw Error(ErrorKind::not_found, {.path = path},
              "base: this file has been removed since the base was opened");
}

/// Makes the hard link `to` to the file `from`, or to the file that a symbolic link `from` names.
/// Does nothing if something already exists at `to`.
void make_link(const std::string& from, const std::string& to) {
  const int failure = ::linkat(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), AT_SYMLINK_FOLLOW);
  if (failure == 0 || errno == EEXIST) return;
  const std::string why = std::generic_category().message(errno);
  if (errno == ENOENT) refuse_removed(from);
  if (errno == EXDEV || errno == EPERM || errno == EMLINK || errno == EOPNOTSUPP ||
      errno == EACCES) {
    throw Error(ErrorKind::unsupported, {.path = from},
                "base: cannot make a hard link at " + printable(to) + ": " + why +
                    " (base and new checkpoint must be on one file system, which must support hard "
                    "links, and Linux may allow them only for files of the same user; without a "
                    "base, all pieces are written)");
  }
  throw Error(ErrorKind::io, {.path = to}, "hard link to " + printable(from) + ": " + why);
}

}  // namespace

std::shared_ptr<const BaseCheckpoint> open_base(const FileSystem& fs, const std::string& path) {
  const Format found = detect_format(fs, path);
  if (found != Format::native) {
    throw Error::expected(ErrorKind::unsupported, {.path = path}, "base", "a native checkpoint",
                          "a checkpoint of the format " + std::string(found.name()));
  }
  require_no_work_in_progress(fs, path);
  return std::make_shared<NativeBase>(open_native_checkpoint(fs, path));
}

void enter_linked_pieces(Index& index, const LinkedPieces& linked) {
  if (linked.pairs.empty()) return;
  const NativeBase& base = native_base(linked);
  const auto places = places_in(base.checkpoint().index());
  std::map<std::pair<std::uint64_t, std::uint32_t>, LinkedFile> files;
  for (const PiecePair& pair : linked.pairs) {
    LinkedFile file = base.file_of(pair.base_piece);
    const std::pair key(file.checkpoint_id, file.rank);
    files.emplace(key, std::move(file));
  }
  const bool links_patched_file = std::ranges::any_of(
      files, [](const auto& file) { return file.second.format_version >= kPatchedVersion; });
  index.format_version =
      linked.changed_rows.empty() && !links_patched_file ? kLinkedVersion : kPatchedVersion;
  std::map<std::pair<std::uint64_t, std::uint32_t>, std::uint32_t> numbers;
  for (auto& [key, file] : files) {
    index.linked_files.push_back(std::move(file));
    numbers[key] = static_cast<std::uint32_t>(index.linked_files.size());
  }
  if (index.linked_files.size() > kMaxLinkedFiles) {
    throw Error::expected(ErrorKind::unsupported, {.path = base.reader().path()},
                          "files of the base", "at most " + std::to_string(kMaxLinkedFiles),
                          std::to_string(index.linked_files.size()));
  }
  index.linked_places.resize(index.storage.num_pieces());
  for (const PiecePair& pair : linked.pairs) {
    const LinkedFile file = base.file_of(pair.base_piece);
    StoredPiece stored = base.stored(pair.base_piece);
    stored.position = pair.piece.piece_index;
    stored.file = numbers.at({file.checkpoint_id, file.rank});
    index.storage.set(pair.piece, stored);
    index.linked_places[index.storage.number_of(pair.piece)] =
        places[pair.base_piece.tensor_index][pair.base_piece.piece_index];
  }
  for (const auto& [piece, rows] : linked.changed_rows) {
    index.patches.emplace(piece,
                          empty_patch(static_cast<std::uint64_t>(rows.count()), index.rows(piece)));
  }
}

void link_files(const FileSystem& fs, const std::string& directory, const Index& index,
                const LinkedPieces& linked, std::span<const PieceId> pieces) {
  const NativeBase& base = native_base(linked);
  std::set<std::uint32_t> numbers;
  for (const PieceId id : pieces) {
    const std::uint32_t file = index.storage.file_of(id);
    if (file != 0) numbers.insert(file - 1);
  }
  const std::string& from = base.reader().path();
  const std::uint64_t base_id = base.checkpoint().checkpoint_id();
  for (const std::uint32_t number : numbers) {
    const LinkedFile& file = index.linked_files[number];
    const std::string name =
        file.checkpoint_id == base_id ? rank_file_name(file.rank) : file.name();
    if (!fs.kind_of(join_path(from, name))) refuse_removed(join_path(from, name));
    require_contained(fs, from, name);
    make_link(join_path(from, name), join_path(directory, file.name()));
    try {
      open_linked_file(fs, directory, file);
    } catch (const Error& error) {
      if (tessera::detail::is_outside_failure(error)) throw;
      throw Error(
          ErrorKind::mismatch, {.path = join_path(from, name)},
          "base: this file has changed since the base was opened: " + std::string(error.reason()));
    }
  }
}

}  // namespace tessera::formats::native
