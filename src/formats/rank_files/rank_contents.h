#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "formats/rank_files/dtensor_pickle.h"
#include "formats/torch_zip/torch_save_layout.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats::rank_files {

/// Into which file of each rank an entry goes, and under which name.
struct Spot {
  std::size_t item = 0;  // in kWrittenItems
  std::string name;      // in the file
  KeyPath path;
  std::uint32_t dict_order = 0;
  std::optional<int> only_on{};  // the rank of a per_rank entry
  std::set<int> not_on{};        // ranks that have a per_rank entry instead
  bool is_on(int rank) const { return only_on.value_or(rank) == rank && !not_on.contains(rank); }
};

/// The spots of all entries. Each list is parallel to the list of that kind in the contents.
struct Spots {
  std::vector<Spot> tensors;
  std::vector<Spot> aliases;
  std::vector<Spot> values;
};

/// Finds where all entries go. If tied tensors would go into two different files of a rank, or if
/// there are entries `optim` and `optim.x`, puts all entries into the same file of each rank.
Spots find_spots(const CheckpointContents& contents);

/// What is in each file of each rank. It is known before any byte of a tensor is written:
///
///     model_world_size_<N>_rank_<R>.pt         entries `model.…`, without `model.`
///     optim_world_size_<N>_rank_<R>.pt         entries `optim.…`, without `optim.`
///     extra_state_world_size_<N>_rank_<R>.pt   entries `extra_state.…`, without `extra_state.`
///     world_size_<N>_rank_<R>.pt               all other entries
///
/// All ranks have files of the same kinds. All entries go into the last file if tied tensors would
/// go into two files, or if there are entries `optim` and `optim.x`. docs/formats/rank_files.md has
/// the rules. Keeps views of the contents and the values, which must outlive this. Immutable; safe
/// to share between threads.
class RankContents {
 public:
  using PieceId = CheckpointWriter::PieceId;

  /// Requires: `values[i]` belongs to `contents.values[i]`.
  /// Throws: Error(invalid_argument) naming a tensor whose pieces no DTensor can have, or key paths
  /// that contradict each other.
  RankContents(const CheckpointContents& contents, const std::vector<Value>& values,
               const DeviceMeshOptions& mesh, const std::string& destination);

  std::size_t num_files() const { return files_.size(); }
  const std::string& name(std::size_t file) const { return files_[file].name; }
  std::set<std::string> names() const;

  /// Returns the piece in each storage of a file. Nothing for a storage with no piece: the storage
  /// of a part without elements, and the last storage, if it holds the numbers of the ranks.
  const std::vector<std::optional<PieceId>>& storages(std::size_t file) const {
    return files_[file].storages;
  }
  /// Returns the bytes of the storage that holds the numbers of all ranks, for the DeviceMesh.
  const std::string& ranks_bytes() const { return ranks_bytes_; }
  bool has_ranks_storage(std::size_t file) const { return files_[file].has_ranks_storage; }

  /// Where a piece's bytes go.
  struct Place {
    std::size_t file = 0;
    std::size_t storage = 0;
  };
  const Place& place_of(PieceId piece) const {
    return places_[piece.tensor_index][piece.piece_index];
  }

  /// Returns the layout of a file. Computes it at each call, so that not all layouts are in memory
  /// at once.
  torch_zip::TorchSaveLayout layout(std::size_t file) const;

  /// Throws Error(unsupported) if Tessera's reader would refuse a file of rank 0.
  void require_readable() const;

 private:
  struct File {
    std::string name;
    std::size_t item = 0;
    int rank = 0;
    std::vector<std::size_t> tensors;  // indexed by storage
    std::vector<std::optional<PieceId>> storages;
    bool has_ranks_storage = false;
  };

  bool is_flat(std::size_t tensor) const;
  void find_pieces();
  std::vector<DTensorCut> fitting_cuts(std::size_t tensor) const;
  void find_cuts();
  bool is_on(std::size_t tensor, int rank) const;
  void add_file(std::size_t item, int rank);
  [[noreturn]] void refuse_pieces(std::size_t tensor) const;
  std::string pickle(const File& file) const;

  const CheckpointContents& contents_;
  const std::vector<Value>& values_;
  const DeviceMeshOptions mesh_;
  const std::string destination_;
  const Spots spots_;
  std::vector<std::optional<DTensorCut>> cuts_;  // indexed by tensor; nothing: an ordinary tensor
  std::vector<std::map<int, std::size_t>> piece_of_rank_;  // indexed by tensor
  std::vector<std::vector<Place>> places_;                 // indexed by tensor and piece
  std::vector<File> files_;
  std::string ranks_bytes_;
};

/// Returns how the outermost dict changes when the files of `contents` are read again. Each of
/// several files has its own order of keys, so a reader sorts the keys of all files by name.
OutermostChanges outermost_changes(const CheckpointContents& contents);

}  // namespace tessera::formats::rank_files
