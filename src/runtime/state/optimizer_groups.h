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

/// Returns the key path of `param_groups` in an optimizer's state dict at `root`.
formats::KeyPath groups_path(const formats::KeyPath& root);

/// Returns the names of the parameters in a saved group with these fields.
std::vector<std::string> members_of(const Value::Dict& fields);

/// Returns the fields of each saved group, including `params`, a list of names. Reads
/// `param_groups.<number>.<field>`, or the flattened form `param_groups.<fqn>.<field>`, in which
/// parameters with equal fields form one group. Ignores keys that belong to no parameter. `root`:
/// the path of the optimizer's state dict in the tree.
std::vector<Value::Dict> saved_groups(const ValueTree& tree, const formats::KeyPath& root,
                                      const std::vector<OptimizerParameter>& parameters);

/// What a load does not use of a checkpoint: a whole value, or one parameter in a group's `params`.
struct UnusedValue {
  std::string key;        // full name in the checkpoint
  std::string parameter;  // the unused item of the list `key`; empty: the whole value is unused
};

/// Returns the values below `root` that `saved_groups` ignores, and names in saved groups that are
/// neither in `parameters` nor `is_known`. A load must report them, or they get lost silently.
std::vector<UnusedValue> unused_values(const ValueTree& tree, const formats::KeyPath& root,
                                       const std::vector<OptimizerParameter>& parameters,
                                       const std::function<bool(const std::string&)>& is_known);

/// Finds for each group of an optimizer the saved group that has its parameters, and returns the
/// fields of that group; nullopt for a group without a saved one. Reports parameters that no saved
/// group has (unless `allow_missing`), and groups whose parameters are in several saved groups.
/// `saved`: the fields of each saved group; `params` is a list of names.
std::vector<std::optional<Value::Dict>> match_groups(
    const std::vector<OptimizerParameter>& parameters, std::size_t num_groups,
    const std::vector<Value::Dict>& saved, LoadReport& report);

}  // namespace tessera::state
