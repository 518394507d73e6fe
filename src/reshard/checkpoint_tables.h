#pragma once

#include <span>
#include <string>
#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/layout/table_planner.h"

namespace tessera::reshard {

/// Returns the embedding tables among some of a checkpoint's tensors, with the bytes of the
/// optimizer state that the checkpoint has of each. Tables are 2-d tensors with the name of one
/// (table_of_weight). `tensors` are indices into `contents.tensors`. What a checkpoint does not
/// tell (features, pooling, weights) is left at its default.
/// Throws: Error(mismatch) where two tensors are tables of one name.
std::vector<TableSize> checkpoint_tables(const formats::CheckpointContents& contents,
                                         std::span<const std::size_t> tensors,
                                         const std::string& path);

}  // namespace tessera::reshard
