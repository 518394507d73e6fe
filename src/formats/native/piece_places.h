#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "formats/native/index.h"
#include "formats/native/packed_pieces.h"

namespace tessera::formats::native {

/// Finds where HDF5 readers see pieces, as StoredPiece::place describes it, for the pieces in rank
/// files and for linked pieces alike. Takes the tensors in the order of the index.
class PiecePlaces {
 public:
  /// `index` must outlive this object.
  explicit PiecePlaces(const Index& index);

  /// Returns the places of the pieces of the next tensor, in the order of its pieces.
  std::vector<std::uint64_t> next_tensor();

 private:
  void count(const TensorEntry& tensor);

  const Index& index_;
  std::size_t next_ = 0;
  std::vector<std::size_t> number_on_rank_;  // of the next tensor in the rank file's list
  std::vector<PackedNumels> packed_on_rank_;
  std::vector<std::size_t> holders_;  // kept for its memory
};

}  // namespace tessera::formats::native
