#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "formats/native/index.h"
#include "formats/native/packed_pieces.h"

namespace tessera::formats::native {

/// Computes, tensor by tensor, where HDF5 readers find each piece: in a rank file or a linked file.
/// A place is one number; Index::linked_places says what it means.
class PiecePlaces {
 public:
  /// `index` must outlive this object.
  explicit PiecePlaces(const Index& index);

  /// Returns the places of the pieces of the next tensor, in the order of its pieces.
  std::vector<std::uint64_t> next_tensor();
  /// Returns the next tensor's number among the tensors in the index of the rank's file.
  std::uint64_t number_on_rank(int rank) const {
    return number_on_rank_[static_cast<std::size_t>(rank)];
  }

 private:
  void count(const TensorEntry& tensor);

  const Index& index_;
  std::size_t next_ = 0;
  std::vector<std::size_t>
      number_on_rank_;  // indexed by rank: the next tensor's number in its file
  std::vector<PackedNumels> packed_on_rank_;
  std::vector<std::size_t> holders_;  // of one call; a member, to reuse its memory
};

}  // namespace tessera::formats::native
