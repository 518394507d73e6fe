#pragma once

#include <span>
#include <string>
#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/layout/table_planner.h"

namespace tessera::reshard {

/// Returns the embedding tables among some of a checkpoint's tensors, each with the bytes of its
/// optimizer state per row and per element. A tensor is a table if it is 2-d and `table_of_weight`
/// finds a table in its name. `tensors`: indices into `contents.tensors`. A checkpoint does not
/// record features, pooling and weights, so they keep their defaults.
/// Throws: Error(mismatch) if two tensors are tables with the same name.
std::vector<TableSize> checkpoint_tables(const formats::CheckpointContents& contents,
                                         std::span<const std::size_t> tensors,
                                         const std::string& path);

}  // namespace tessera::reshard
