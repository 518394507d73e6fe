#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/layout/table_plan.h"

namespace tessera::inspect {

/// How a tensor is cut, as far as its pieces tell.
struct LayoutPattern {
  enum class Cut {
    empty,       // the tensor has no elements
    whole,       // one region, all of it
    dimension,   // slabs along one dimension (`dim`)
    flat,        // ranges of the row-major order
    boxes,       // anything else
    incomplete,  // elements are missing, or in two regions that are no replicas
  } cut = Cut::empty;
  std::size_t dim = 0;
  std::int64_t num_shards = 0;    // different regions, without empty ones
  std::int64_t num_replicas = 0;  // pieces per region; 0 where they differ

  friend bool operator==(const LayoutPattern&, const LayoutPattern&) = default;
};

/// Returns how the pieces of a tensor cut it.
LayoutPattern layout_pattern(const formats::TensorEntry& tensor);

/// Returns `whole`, `whole × 4`, `dim 0 / 4`, `flat / 4 × 2`: the cut, the shards, the replicas.
std::string layout_pattern_to_string(const LayoutPattern& pattern);

/// Returns the sharding type of an embedding table's weight, as far as its pieces tell: row_wise,
/// column_wise, grid, or data_parallel where all of it is there several times. Nothing for other
/// tensors, and for a table that is there once: on disk table_wise and data_parallel look alike.
std::optional<TableSharding> table_sharding(const formats::TensorEntry& tensor);

/// Returns the elements of the tensor that each rank holds. Shape: `[world_size]`.
std::vector<std::int64_t> numel_by_rank(const formats::TensorEntry& tensor, int world_size);

/// Draws shares as one character each: `·` for none, `▁` to `█` up to the largest. Where there are
/// more than `max_width`, a character stands for several, and shows the largest of them.
std::string draw_shares(std::span<const std::int64_t> shares, std::size_t max_width);

/// Returns how many shares one character of `draw_shares` stands for. Requires: `max_width > 0`.
std::size_t shares_per_character(std::size_t num_shares, std::size_t max_width);

}  // namespace tessera::inspect
