#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "recipe/wrappers.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::recipe {

/// The parts of a name that an optimizer gave: `optim.state.layers.0.weight.exp_avg`, or
/// `optimizer.state.exp_avg.layers.0.weight`.
struct StateName {
  std::string root;                // `optim.state.`, or `optimizer.state.exp_avg.`
  std::string parameter;           // `layers.0.weight`, as the optimizer calls it
  std::size_t removed_nbytes = 0;  // length of what the optimizer leaves out, such as `model.`
  std::string rest;                // `.exp_avg`, or empty

  /// Returns what the optimizer calls the state: `exp_avg`.
  std::string_view state() const;
};

/// Finds the parameter in the name of an optimizer's entry: `optim.state.<name>.<key>`,
/// `optim.param_groups.<name>.<key>` or `optimizer.state.<key>.<name>`. Keeps views of the names in
/// `contents`.
class StateNames {
 public:
  /// `parameters` are the indices of tensors that may be parameters.
  StateNames(const formats::CheckpointContents& contents,
             const std::vector<std::size_t>& parameters);

  /// Splits the name of state of this parameter. Returns nothing if the name does not contain the
  /// parameter's name.
  std::optional<StateName> split(std::string_view fqn, std::size_t parameter) const;

  /// A name that an optimizer gave, and the tensor that is its parameter.
  struct Found {
    StateName name;
    std::size_t parameter;
  };
  /// Splits the name of a value below a `state` or a `param_groups`. Returns nothing if it names no
  /// parameter.
  std::optional<Found> find(std::string_view name) const;

  /// Returns the parameter that an optimizer calls `name`, with the part of its name that `name`
  /// lacks.
  std::optional<Found> find_parameter(std::string_view name) const;

 private:
  const formats::CheckpointContents& contents_;
  std::unordered_map<std::string_view, std::vector<std::size_t>> by_suffix_;
  std::unordered_map<std::size_t, std::vector<std::string_view>> names_;  // a tensor's own, aliases
};

/// Returns what an optimizer calls the parameter `fqn`, if it called `old_fqn` `name.parameter`.
std::string optimizer_name_of(const std::string& fqn, const std::string& old_fqn,
                              const StateName& name, const Wrappers& wrappers);

/// Returns the key path for `new_name`. Keeps the outer string keys of `path` that `new_name` also
/// begins with; the rest of `new_name` becomes one last key. Returns an empty path if `path` does
/// not spell `old_name`.
formats::KeyPath path_of_new_name(const formats::KeyPath& path, const std::string& old_name,
                                  const std::string& new_name);

/// Returns the key path of an entry of optimizer state whose parameter is now called
/// `new_parameter`. Returns an empty path if `path` does not have the parameter where `name` says.
formats::KeyPath path_of_state(const formats::KeyPath& path, const StateName& name,
                               const std::string& new_parameter);

}  // namespace tessera::recipe
