#pragma once

#include <optional>
#include <vector>

#include "runtime/state/optimizer_parameters.h"
#include "runtime/state/value_tree.h"
#include "tessera/base/value.h"
#include "tessera/runtime/registry/state_dict_hooks.h"

namespace tessera::state {

/// Returns where the groups of a state dict are, which is at `root` itself.
formats::KeyPath groups_path(const formats::KeyPath& root);

/// Returns the fields of saved groups, with `params` a list of names:
/// `param_groups.<number>.<field>` or, flattened, `param_groups.<fqn>.<field>`, of which those of
/// equal fields are one group. What stands under no parameter's name is left out. `root`: where in
/// the tree the state dict is.
std::vector<Value::Dict> saved_groups(const ValueTree& tree, const formats::KeyPath& root,
                                      const std::vector<OptimizerParameter>& parameters);

/// Returns, for each of an optimizer's groups, the fields of the one among `saved` that has its
/// parameters; nothing for one that has none there. Reports parameters that no saved group has, and
/// groups whose parameters are in several. `saved`: fields by group, `params` a list of names.
std::vector<std::optional<Value::Dict>> match_groups(
    const std::vector<OptimizerParameter>& parameters, std::size_t num_groups,
    const std::vector<Value::Dict>& saved, LoadReport& report);

}  // namespace tessera::state
