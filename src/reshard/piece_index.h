#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// An index that finds the pieces of a tensor that share elements with a region. Immutable; keeps a
/// view of the tensor, which must outlive it.
class PieceIndex {
 public:
  explicit PieceIndex(const formats::TensorEntry& tensor);

  /// Returns the numbers of the pieces in ascending order. Of several replicas (pieces of the same
  /// region), returns one: that of `rank` itself if it has one, otherwise one that depends on
  /// `rank`, so that ranks read different replicas.
  std::vector<std::uint32_t> pieces_sharing(const Region& region, int rank) const;

 private:
  /// Pieces with the same region.
  struct Group {
    FlatRange bounds;        // first element and end of the last, in row-major order
    bool is_range;           // the region has all elements of `bounds`
    std::vector<Box> boxes;  // empty if is_range
    std::vector<std::uint32_t> pieces;
  };
  static Group describe(const Region& region, std::span<const std::int64_t> shape);
  std::uint32_t choose(const Group& group, int rank) const;

  const formats::TensorEntry& tensor_;
  std::vector<Group> groups_;  // sorted by bounds.begin
  std::int64_t longest_bounds_ = 0;
};

std::vector<Region> regions_of(const formats::TensorEntry& tensor);  // one per piece, in order

/// Returns the region from which a destination region is copied: a region of the source tensor, or
/// of the merged rows if row-wise state is merged.
Region region_in_source(const TensorCopy& copy, const Region& destination,
                        std::span<const std::int64_t> destination_shape);

/// Sets `copy.source_pieces`: the source pieces that each piece of a destination tensor needs.
void find_sources(const formats::TensorEntry& source, const formats::TensorEntry& destination,
                  TensorCopy& copy);

}  // namespace tessera::reshard
