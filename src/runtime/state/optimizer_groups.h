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

/// Returns the path of the groups in a state dict at `root`.
formats::KeyPath groups_path(const formats::KeyPath& root);

/// Returns the fields of saved groups; `params` is a list of names. Reads
/// `param_groups.<number>.<field>`, or the flattened `param_groups.<fqn>.<field>`, where parameters
/// with equal fields form one group. Ignores keys that belong to no parameter. `root`: the path of
/// the state dict in the tree.
std::vector<Value::Dict> saved_groups(const ValueTree& tree, const formats::KeyPath& root,
                                      const std::vector<OptimizerParameter>& parameters);

/// A saved value, or a parameter in a saved group, that nothing loads.
struct UnusedValue {
  std::string key;        // from the top of the tree
  std::string parameter;  // in a list of names; empty if it is the value itself
};

/// Returns the values below `root` that `saved_groups` ignores, and the parameters of saved groups
/// for which `is_known` is false. The fields of both would be lost.
std::vector<UnusedValue> unused_values(const ValueTree& tree, const formats::KeyPath& root,
                                       const std::vector<OptimizerParameter>& parameters,
                                       const std::function<bool(const std::string&)>& is_known);

/// Returns, for each group of an optimizer, the fields of the saved group with its parameters;
/// nullopt if there is none. Reports parameters that no saved group has, and groups whose
/// parameters are in several saved groups. `saved`: fields by group; `params` is a list of names.
std::vector<std::optional<Value::Dict>> match_groups(
    const std::vector<OptimizerParameter>& parameters, std::size_t num_groups,
    const std::vector<Value::Dict>& saved, LoadReport& report);

}  // namespace tessera::state
