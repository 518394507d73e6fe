#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "recipe/wrappers.h"
#include "reshard/optimizer_rules.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::recipe {

/// The parts of the name of optimizer state: `optim.state.layers.0.weight.exp_avg`, or
/// `optimizer.state.exp_avg.layers.0.weight`.
struct StateName {
  std::string root;       // `optim.state.`, or `optimizer.state.exp_avg.`
  std::string parameter;  // the parameter's name in it: `layers.0.weight`
  /// The parameter's full name in the checkpoint, `model.layers.0.weight`. A tied
  /// parameter has several names; this is the one that the optimizer uses. A view of the
  /// contents.
  std::string_view full_name;
  std::string rest;  // `.exp_avg`, or empty

  /// Returns the name of the state itself: `exp_avg`.
  std::string_view state() const;
};

/// Finds the parameter's name inside the name of optimizer state: `optim.state.<name>.<key>`,
/// `optim.param_groups.<name>.<key>` or `optimizer.state.<key>.<name>`. Keeps views of the names in
/// `contents`.
class StateNames {
 public:
  /// `parameters`: indices of the tensors that may be parameters. `prefix`: the text that names of
  /// the model begin with; may be empty.
  StateNames(const formats::CheckpointContents& contents,
             const std::vector<std::size_t>& parameters, std::string prefix);

  /// Splits the name `fqn` of state of this parameter into its parts. Returns nothing if the name
  /// contains none of the parameter's names. If it may contain several of them, chooses as
  /// `find_parameter` does.
  std::optional<StateName> split(std::string_view fqn, std::size_t parameter) const;

  /// The parts of a name of optimizer state, and the index of its parameter.
  struct Found {
    StateName name;
    std::size_t parameter;
  };
  /// Splits the name of a value below `state` or `param_groups` into its parts. Returns nothing if
  /// the name contains no parameter's name.
  std::optional<Found> find(std::string_view name) const;

  /// Returns the parameter whose name in an optimizer is `name`, which may lack first components
  /// such as `model.`. If several fit, returns the one that shares most first components with
  /// `entry`, the name of the entry that contains `name`; of these, the one whose own name has the
  /// fewest more components; of these, the one that begins with the prefix of the model; of these,
  /// the one in a dict of the model (`model.fc.weight`, not `ema.fc.weight`).
  std::optional<Found> find_parameter(std::string_view name, std::string_view entry) const;

  /// Returns whether this is the name of state of a numbered parameter: `optim.state.0.exp_avg`.
  bool is_of_number(std::string_view name) const;

  /// Full names that an optimizer may mean by one name, because they fit equally well.
  struct Candidates {
    std::vector<std::string_view> names;
    bool is_decided = true;  // the prefix, or the dict of the model, tells which one it is
  };
  /// Returns the names between which `find_parameter` chooses by the model's prefix and dict.
  Candidates candidates_for(std::string_view name, std::string_view entry) const;

 private:
  /// Returns how well a name fits; the greater pair is better: whether it begins with the prefix,
  /// and how many of its first components, `removed`, name a dict of the model.
  std::pair<bool, std::size_t> model_fit(std::string_view full_name,
                                         std::string_view removed) const;

  reshard::StateRoots states_;
  std::string prefix_;
  std::unordered_map<std::string_view, std::vector<std::size_t>> by_suffix_;
  // By index of a tensor, all of its names: its own and its aliases.
  std::unordered_map<std::size_t, std::vector<std::string_view>> names_;
};

/// Returns the name that an optimizer uses for the parameter `fqn`: `fqn` without the first
/// components that the optimizer also drops from `name.full_name` to make `name.parameter`.
std::string optimizer_name_of(const std::string& fqn, const StateName& name,
                              const Wrappers& wrappers);

/// Returns the name of optimizer state after the optimizer's name of its parameter has become
/// `new_parameter`. torchrec's names have the table's name once more after the parameter
/// (`.t.momentum1`), which changes too if the new parameter is a table.
std::string name_of_state(const StateName& name, const std::string& new_parameter);

/// Returns the key path for `new_name`. Its first keys are those string keys of `path` that
/// `new_name` begins with; the rest of `new_name` becomes one last key. For a path of the keys
/// `model` and `a.w`, the new name `model.b.w` gives the keys `model` and `b.w`. Returns an empty
/// path if the keys of `path`, joined by dots, are not `old_name`.
formats::KeyPath path_of_new_name(const formats::KeyPath& path, const std::string& old_name,
                                  const std::string& new_name);

/// Returns the key path for `name_of_state(name, new_parameter)`; `path` is that of the old name.
/// Keeps the dicts around a parameter's name that is a key, or the begin of one, as
/// `flatten_optimizer_state_dict` makes it. Returns an empty path if `path` does not spell `name`.
formats::KeyPath path_of_state(const formats::KeyPath& path, const StateName& name,
                               const std::string& new_parameter);

}  // namespace tessera::recipe
