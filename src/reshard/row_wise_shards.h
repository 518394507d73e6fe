#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tessera/layout/strategy.h"

// Computes which rank holds which row-wise state of a parameter, from the shards of the parameter.
namespace tessera::reshard {

/// Returns the shards of row-wise state (one number per row), given those of its parameter: the
/// rank that holds the first element of a row holds the row's state. Shape: `[rows]` or `[rows, 1,
/// …]`. Requires: `parameter_shards` cover the parameter once.
std::vector<Shard> row_wise_shards(std::span<const Shard> parameter_shards,
                                   std::span<const std::int64_t> parameter_shape,
                                   std::span<const std::int64_t> state_shape);

/// Returns the shards of row_wise_per_shard state: each shard of the table holds its own rows, in
/// the block of its columns. Shape: `[rows * column shards]`. Requires: a 2-d table cut into boxes
/// that cover it once.
std::vector<Shard> shards_of_row_blocks(std::span<const Shard> parameter_shards,
                                        std::span<const std::int64_t> parameter_shape);

/// Returns the widths of the column shards into which `regions` cut a 2-d table, from left to
/// right. Units: elements. There are column shards if all regions with elements are boxes, boxes
/// that start at the same column have the same width, and the column ranges cover the table without
/// gap or overlap. Otherwise returns one entry, the width of the table; 1 if the shape is not 2-d.
std::vector<std::int64_t> column_widths(std::span<const Region> regions,
                                        std::span<const std::int64_t> shape);

}  // namespace tessera::reshard
