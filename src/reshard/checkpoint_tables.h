#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/tied_tables.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/layout/table_planner.h"

namespace tessera::reshard {

/// Returns the embedding tables that have `names`, each with the bytes of its optimizer state per
/// row and per element. A tensor that is not 2-d is not a table. Tied tables are one table, with
/// the first of their names and the state of all of them. A rank's own copy of a table is no table
/// of its own (is_copy_of_rank). A checkpoint does not record features, pooling and weights, so
/// they keep their defaults.
/// Throws: Error(mismatch) if two tensors, other than copies of ranks, are tables of one name.
std::vector<TableSize> checkpoint_tables(const formats::CheckpointContents& contents,
                                         std::span<const TableName> names, const std::string& path);

/// Whether a tensor is a rank's own copy of a tensor that the other ranks share:
/// `per_rank.<rank>.<name>` beside `<name>`.
bool is_copy_of_rank(const formats::CheckpointContents& contents, std::string_view fqn);

}  // namespace tessera::reshard
