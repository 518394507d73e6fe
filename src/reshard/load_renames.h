#pragma once

#include <set>
#include <string>
#include <vector>

#include "tessera/base/name_rules.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

// Renames of a checkpoint's names during a load.

namespace tessera::reshard {

/// Returns what comes before `state.` and `param_groups.` in the names of a checkpoint's
/// optimizers, such as `optim.`. A dict that has only `state`, such as `rng`, is an optimizer only
/// if its name begins with `optim`.
std::set<std::string> optimizer_prefixes(const formats::CheckpointContents& contents);

/// Returns `renames`, followed by the renames of optimizer state that they imply: `{"model.fc.",
/// "model.up."}` also renames `optim.state.fc.`, if the checkpoint has such names. The optimizer
/// may have another name than `optim`.
std::vector<Rename> with_optimizer_renames(const std::vector<Rename>& renames,
                                           const formats::CheckpointContents& source);

/// Returns `value`, which the checkpoint calls `name`. If `value` is the list of a group's
/// parameters (`optim.param_groups.0.params`), renames the parameters in the list as their state is
/// renamed.
Value with_renamed_members(const std::string& name, Value value,
                           const std::vector<Rename>& renames);

/// A rename of a prefix that would make names of the checkpoint fit the job, and how many names it
/// fixes.
struct RenamedNames {
  Rename rename;  // prefix in the checkpoint, prefix in the job
  std::size_t num_tensors = 0;
  std::size_t num_optimizer_problems = 0;
};

/// Matches missing tensors with unexpected tensors of equal shape, apart from optimizer state, if
/// each is the other's only best match (most common name components). Returns renames of prefixes
/// that turn unexpected names into missing ones, longest first, because a load uses the first that
/// fits. Ignores names that `given` renames. Sets `explained`: whether a rename fixes each problem.
std::vector<RenamedNames> find_renames(const std::vector<formats::Finding>& problems,
                                       const formats::CheckpointContents& source,
                                       const formats::CheckpointContents& wanted,
                                       const std::vector<Rename>& given,
                                       std::vector<bool>& explained);

}  // namespace tessera::reshard
