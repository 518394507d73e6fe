#pragma once

#include <optional>
#include <vector>

#include "runtime/state/optimizer_parameters.h"
#include "tessera/base/value.h"
#include "tessera/runtime/registry/state_dict_hooks.h"

namespace tessera::state {

/// Returns, for each of an optimizer's groups, the fields of the one among `saved` that has its
/// parameters; nothing for one that has none there. Reports parameters that no saved group has, and
/// groups whose parameters are in several. `saved`: fields by group, `params` a list of names.
std::vector<std::optional<Value::Dict>> match_groups(
    const std::vector<OptimizerParameter>& parameters, std::size_t num_groups,
    const std::vector<Value::Dict>& saved, LoadReport& report);

}  // namespace tessera::state
