#pragma once

#include <functional>
#include <optional>
#include <string>
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

/// What a saved optimizer has beside state, and nothing takes.
struct UnusedValue {
  std::string key;        // from the top of the tree
  std::string parameter;  // in a list of names; empty: it is a value of its own
};

/// Returns the values below `root` that `saved_groups` leaves out, and the parameters that a saved
/// group has and `is_known` does not know: their fields would be dropped.
std::vector<UnusedValue> unused_values(const ValueTree& tree, const formats::KeyPath& root,
                                       const std::vector<OptimizerParameter>& parameters,
                                       const std::function<bool(const std::string&)>& is_known);

/// Returns, for each of an optimizer's groups, the fields of the one among `saved` that has its
/// parameters; nothing for one that has none there. Reports parameters that no saved group has, and
/// groups whose parameters are in several. `saved`: fields by group, `params` a list of names.
std::vector<std::optional<Value::Dict>> match_groups(
    const std::vector<OptimizerParameter>& parameters, std::size_t num_groups,
    const std::vector<Value::Dict>& saved, LoadReport& report);

}  // namespace tessera::state
