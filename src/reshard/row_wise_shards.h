#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/layout/strategy.h"

// Computes which rank holds which row-wise state of a parameter, from the shards of the parameter.
namespace tessera::reshard {

/// Returns the shards of row-wise state, given the shards of its parameter: the rank that holds the
/// first element of a parameter's row holds the row's state. Shape: `[rows]` or `[rows, 1, …]`.
/// Requires: `parameter_shards` cover the parameter once.
std::vector<Shard> row_wise_shards(std::span<const Shard> parameter_shards,
                                   std::span<const std::int64_t> parameter_shape,
                                   std::span<const std::int64_t> state_shape);

/// Returns the shards of row_wise_per_shard state: each shard of the table holds its own rows, in
/// the block of its columns. Shape: `[rows * column shards]`. Requires: a 2-d table cut into boxes
/// that cover it once.
std::vector<Shard> shards_of_row_blocks(std::span<const Shard> parameter_shards,
                                        std::span<const std::int64_t> parameter_shape);

/// Returns the widths of the column shards that `regions` cut a 2-d table into, in order of column.
/// The cut is by column if regions with the same first column have the same width, and these column
/// ranges are adjacent; else returns one entry, the width of the table. Units: elements.
std::vector<std::int64_t> column_widths(std::span<const Region> regions,
                                        std::span<const std::int64_t> shape);

}  // namespace tessera::reshard
