#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "tessera/base/glob.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// What the caller allows beyond an exact fit (default: nothing).
struct LoadPlanOptions {
  Relaxation missing = Relaxation::refuse;     // what the checkpoint lacks stays as it is
  Relaxation unexpected = Relaxation::refuse;  // what is not wanted is passed over
  Relaxation cast = Relaxation::refuse;        // between floating dtypes
  Relaxation lossy = Relaxation::refuse;       // merge state that is kept per column shard
  NameSelection only{};           // over the wanted names; the rest stays, and is not unexpected
  std::vector<Rename> renames{};  // from the checkpoint's names to the wanted ones
};

/// Plans to fill the tensors that `rank` holds. `wanted` lists all tensors of the job, also those
/// of which this rank holds nothing, each with the pieces that this rank holds (any number, also
/// none; they may overlap); kinds and parameters of optimizer state, aliases and names of values as
/// the job has them.
///
/// The plan's destination are the wanted tensors and values that are loaded, for a writer that
/// copies into memory. A tensor may come from an alias of the checkpoint, and an alias may be a
/// tensor there: it is enough that the checkpoint has every name. Where it has a tensor only under
/// a tied name, the tensor comes from there, and the other name is missing.
///
/// State under torchrec's names fills wanted tensors with canonical ones (torchrec_names.h), unless
/// torchrec's name itself is wanted.
///
/// `problems` has all that does not fit: missing and unexpected names, shapes, dtypes, kinds of
/// state, holes and overlaps in what is needed, bare flat vectors. It is the same on every rank,
/// with one exception: that a table is cut by other columns (row_wise_per_shard) is seen by the
/// ranks that hold some of it.
/// Requires: names sorted and unique, pieces within their tensors, `rank` below the world size.
/// Throws: Error(invalid_argument) where a pattern or a rename fits no name.
/// Cost: O(pieces log pieces) per tensor for the layouts met in practice.
Plan plan_load(const formats::CheckpointContents& source, const std::string& source_path,
               const formats::CheckpointContents& wanted, int rank, const LoadPlanOptions& options);

/// Returns one line per problem, `<where>: <rule>: expected <x>, found <y>`, and behind the first
/// `max_lines` of them how many more there are. Lines are separated, not ended, by line feeds.
std::string problems_to_string(const std::vector<formats::Finding>& problems,
                               std::size_t max_lines);

}  // namespace tessera::reshard
