#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "tessera/base/name_rules.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// What the caller allows beyond an exact fit (default: nothing).
struct LoadPlanOptions {
  Relaxation missing = Relaxation::refuse;     // what the checkpoint lacks keeps its value
  Relaxation unexpected = Relaxation::refuse;  // skip what the checkpoint has and nobody wants
  Relaxation cast = Relaxation::refuse;        // between floating dtypes
  Relaxation lossy = Relaxation::refuse;       // merge state that is stored per column shard
  NameSelection only{};  // of the wanted names; others keep their values, and are not unexpected
  std::vector<Rename> renames{};  // from the checkpoint's names to the wanted ones
};

/// Plans to fill the tensors that `rank` holds. `wanted` lists all tensors of the job, each with
/// the pieces that this rank holds (any number, also none; they may overlap). It also has the kinds
/// and parameters of optimizer state, the aliases and the names of values, as the job has them.
///
/// The plan's destination has the wanted tensors and values that are loaded, for a writer that
/// copies into memory. The checkpoint must have every wanted name, as a tensor or as an alias. If
/// it has a tensor only under a tied name, that tensor is loaded, and the other name is missing.
///
/// State under torchrec's names fills wanted tensors with canonical names (torchrec_names.h),
/// unless torchrec's name itself is wanted.
///
/// `problems` lists everything that does not fit: one part of a checkpoint (PartOfWhole), missing
/// and unexpected names, shapes, dtypes, kinds of state, holes and overlaps in the needed elements,
/// bare flat vectors. `problems` is the same on every rank, with one exception: if the columns of a
/// table are cut differently (row_wise_per_shard), only the ranks that hold a shard of the table
/// report this.
/// Requires: names sorted and unique, pieces within their tensors, `rank` below the world size.
/// Throws: Error(invalid_argument) if a pattern or a rename matches no name.
/// Cost: O(pieces log pieces) per tensor for the layouts met in practice.
Plan plan_load(const formats::CheckpointContents& source, const std::string& source_path,
               const formats::CheckpointContents& wanted, int rank, const LoadPlanOptions& options);

/// Returns one line per problem, `<where>: <rule>: expected <x>, found <y>`. After `max_lines`
/// lines, one more line says how many problems are left. The last line has no line feed.
std::string problems_to_string(const std::vector<formats::Finding>& problems,
                               std::size_t max_lines);

}  // namespace tessera::reshard
