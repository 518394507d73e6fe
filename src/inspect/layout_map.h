#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/layout/table_plan.h"

namespace tessera::inspect {

/// How a tensor is cut, derived from its pieces.
struct LayoutPattern {
  enum class Cut {
    empty,       // the tensor has no elements
    whole,       // each piece is the whole tensor
    dimension,   // each piece is a range of one dimension (`dim`), and whole in the others
    flat,        // each piece is a range of the elements in row-major order
    boxes,       // anything else
    incomplete,  // some elements are in no piece, or in two different regions
  } cut = Cut::empty;
  std::size_t dim = 0;
  std::int64_t num_shards = 0;    // different regions that are not empty
  std::int64_t num_replicas = 0;  // pieces per region; 0 if not the same for all regions

  friend bool operator==(const LayoutPattern&, const LayoutPattern&) = default;
};

/// Returns how the pieces of a tensor cut it.
LayoutPattern layout_pattern(const formats::TensorEntry& tensor);

/// Returns the pattern in words: the cut, then `/ shards` and `× replicas` (`× ?` if not the same
/// for all). Examples: `whole`, `whole × 4`, `dim 0 / 4`, `flat / 4 × 2`.
std::string layout_pattern_to_string(const LayoutPattern& pattern);

/// Returns the sharding type of an embedding table's weight, derived from its pieces: row_wise,
/// column_wise, grid, or data_parallel for several whole copies. Returns nothing for other tensors,
/// and for a single whole copy, which may come from table_wise or from data_parallel.
std::optional<TableSharding> table_sharding(const formats::TensorEntry& tensor);

/// Returns how many elements of the tensor each rank holds. Shape: `[world_size]`.
std::vector<std::int64_t> numel_by_rank(const formats::TensorEntry& tensor, int world_size);

/// Draws a bar chart in one line, with a character for each share (such as a rank's elements): `·`
/// for 0, `▁` to `█` for the largest. If there are more than `max_width` shares, a character shows
/// the largest of several shares.
std::string draw_shares(std::span<const std::int64_t> shares, std::size_t max_width);

/// Returns how many shares a character of `draw_shares` shows. Requires: `max_width > 0`.
std::size_t shares_per_character(std::size_t num_shares, std::size_t max_width);

}  // namespace tessera::inspect
