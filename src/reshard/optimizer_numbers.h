#pragma once

#include <memory>

#include "tessera/base/name_rules.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::reshard {

/// Returns a reader that shows the same checkpoint, with numbers where an optimizer has names of
/// parameters: `optim.state.0.exp_avg`, `params = [0, 1]`. The numbers are those of
/// `optimizer.state_dict()`: the order of the names in the lists `params`, one group after another.
/// If several optimizers have names, it is the one with the `param_groups` that `only` selects.
/// Throws: Error(mismatch) if there is no such optimizer or several, if a name is in two lists, or
/// if state belongs to a name that is in no list; what `find_named_optimizer` throws.
std::unique_ptr<formats::CheckpointReader> number_optimizer_params(
    std::unique_ptr<formats::CheckpointReader> source, const NameSelection& only);

}  // namespace tessera::reshard
