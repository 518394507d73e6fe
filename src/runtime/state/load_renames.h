#pragma once

#include <string>
#include <vector>

#include "tessera/base/rename.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

// Names of a checkpoint that a load maps to others.

namespace tessera::state {

/// Returns the renames, and behind them those of optimizer state that follow from renames of
/// parameters: `{"model.fc.", "model.up."}` is one of `optim.state.fc.` too, where the checkpoint
/// has names that begin so.
std::vector<Rename> with_optimizer_renames(const std::vector<Rename>& renames,
                                           const formats::CheckpointContents& source);

/// Returns a value of the checkpoint, which is called `name` there; where it is the list of a
/// group's parameters (`optim.param_groups.0.params`) with the names that their state gets.
Value with_renamed_members(const std::string& name, Value value,
                           const std::vector<Rename>& renames);

/// What is missing under one name and unexpected under another one.
struct RenamedNames {
  Rename rename;  // of a prefix
  std::size_t num_tensors = 0;
  std::size_t num_optimizer_problems = 0;
};

/// Finds tensors of the model that are missing and those of equal shapes that are unexpected, where
/// each is the other's only best match, and the renames that make one of the other. Longest
/// prefixes first, as the first one that fits is taken. Adds to `explained`, parallel to
/// `problems`, which of them the renames would solve.
std::vector<RenamedNames> find_renames(const std::vector<formats::Finding>& problems,
                                       const formats::CheckpointContents& source,
                                       const formats::CheckpointContents& wanted,
                                       const std::vector<Rename>& given,
                                       std::vector<bool>& explained);

}  // namespace tessera::state
