#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "recipe/state_names.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::recipe {

/// A tensor or an alias that rules may name.
struct Input {
  const std::string* name;
  const formats::SharedKeyPath* key_path;
  std::size_t tensor;  // index in the contents; for an alias, that of its tensor
  bool is_alias;
  std::uint32_t dict_order;
};

/// A tensor of optimizer state, or an alias of one (a `step` that parameters share), with the parts
/// of its name.
struct State {
  const std::string* fqn;
  const formats::SharedKeyPath* key_path;
  std::size_t tensor;  // as in Input
  bool is_alias;
  std::uint32_t dict_order;
  StateName name;
  formats::StateKind kind;
};

/// The tensors and aliases of a checkpoint that rules may name, and for each parameter its
/// optimizer state. Keeps references to `contents`.
class Inputs {
 public:
  /// `prefix`: the text that the names of the model's tensors begin with (`model.`); may be empty.
  explicit Inputs(const formats::CheckpointContents& contents, const std::string& prefix = {});

  /// Returns the tensors, in their order, then the aliases; leaves out the state of parameters.
  const std::vector<Input>& all() const { return inputs_; }
  /// Returns the state of a parameter. The optimizer names a tied parameter by one of its names
  /// only; the tensor or alias with that name has the state.
  const std::vector<State>& states_of(const Input& parameter) const;
  /// Optimizer state whose name does not tell to which parameter it belongs.
  struct Undecided {
    const std::string* fqn;                    // of the tensor or value
    std::vector<std::string_view> parameters;  // names of those that it may belong to
  };
  const std::vector<Undecided>& undecided() const { return undecided_; }
  const StateNames& state_names() const { return *state_names_; }
  /// Moves `state_names` out. Do not call it or `state_names` again.
  StateNames take_state_names() { return *std::move(state_names_); }
  /// Returns whether the checkpoint may have optimizer state.
  bool has_optimizer() const { return has_optimizer_; }

 private:
  void find_undecided(const formats::CheckpointContents& contents);

  std::vector<Input> inputs_;
  std::vector<Undecided> undecided_;
  // The key is StateName::full_name.
  std::unordered_map<std::string_view, std::vector<State>> states_;
  std::optional<StateNames> state_names_;
  bool has_optimizer_;
};

}  // namespace tessera::recipe
