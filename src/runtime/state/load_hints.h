#pragma once

#include <string>
#include <vector>

#include "reshard/load_hints.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/runtime/registry/state_dict_hooks.h"
#include "tessera/runtime/state/module_state_dict.h"
#include "tessera/runtime/state/train_state.h"

// Hints in the error of a load that was refused. Each hint says in one sentence what the user can
// do.

namespace tessera::state {

/// Returns the hints with C++'s options. `held`: the first components of all names of the
/// TrainState.
std::vector<std::string> texts_of(const reshard::LoadHints& hints,
                                  const std::vector<std::string>& held, const LoadOptions& options);

/// Returns a hint if the module's `own` state dict has other names than its parameters and buffers,
/// and these names are among the problems. Requires: the module's load pre hooks do not undo its
/// post hooks; the caller has tried.
std::vector<std::string> hints_for_hooks(const std::vector<formats::Finding>& problems,
                                         const StateDict& own);

std::vector<std::string> hints_for_state_dict(const StateDict& state_dict,
                                              const torch::nn::Module& module,
                                              const LoadStateDictOptions& options);

}  // namespace tessera::state
