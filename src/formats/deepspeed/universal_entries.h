#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::deepspeed {

/// An entry of a nested state dict: a tensor, by its index in the contents, or a value.
struct Leaf {
  std::string name;  // in the contents, for messages
  KeyPath path;      // without the first keys, which say where the entry belongs
  std::variant<std::size_t, Value> content;

  const std::size_t* tensor() const { return std::get_if<std::size_t>(&content); }
  const Value* value() const { return std::get_if<Value>(&content); }
};

inline constexpr std::string_view kStep = "step";  // the kind of state

/// Returns a parameter's step; null if its state has none.
const Leaf* step_in(const std::vector<Leaf>& state);

/// A group of an optimizer's parameters.
struct ParamGroup {
  std::vector<std::string> params;  // names
  bool lists_params = false;        // whether the group has the field `params`
  std::vector<Leaf> fields;         // all but `params`
};

/// The entries of a checkpoint, sorted by where they belong in DeepSpeed's files.
struct UniversalEntries {
  std::map<std::string, Leaf> weights;             // tensors of the module, by name
  std::map<std::string, std::size_t> ties;         // by second name: the index of the tensor
  std::map<std::string, KeyPath> tie_paths;        // by second name: its path in the module
  std::vector<Leaf> module_values;                 // values in the module
  std::map<std::string, std::vector<Leaf>> state;  // by parameter; the path is the kind
  std::vector<ParamGroup> groups;                  // of the optimizer
  std::vector<Leaf> optimizer_members;             // `deepspeed.optimizer_state_dict.…`
  std::vector<Leaf> model_members;                 // `deepspeed.…`, and what the user saved
  std::vector<std::string> order;  // all names in the order of dicts; empty: in the order of names
  std::vector<KeyPath> paths;      // of the model and its state, if names do not show them
  std::vector<Leaf> empty;  // dicts and lists of the optimizer and of DeepSpeed that have no items
};

/// Sorts the entries by their key paths: `model.<fqn>`, `optim.state.<fqn>.<kind>`,
/// `optim.param_groups.<i>.<field>`, `deepspeed.…`; all else is what the user saved. In a
/// checkpoint without any of these keys, tensors at the top are the module's. Requires: `values[i]`
/// belongs to `contents.values[i]`. Throws: Error(unsupported) naming an entry that DeepSpeed
/// cannot store.
UniversalEntries sort_entries(const CheckpointContents& contents, const std::vector<Value>& values,
                              const std::string& destination);

/// Returns how many tensors and aliases at the top get `model.` in front of their names: all of
/// them, or 0. It is 0 if an entry is below a key `model`, `optim` or `deepspeed`. It is also 0 if
/// an entry has a flat name such as `optim.state.w.exp_avg`, `optim.param_groups.0.lr` or
/// `deepspeed.x`. Other flat names, such as `optim.foo`, do not count.
std::size_t num_bare_tensors(const CheckpointContents& contents);

/// Returns how many outermost keys begin with `model.` (`model.w`) and move into the dict `model`,
/// under the rest of their name (`w`). 0 if the checkpoint has no dict `model`.
std::size_t num_keys_into_model(const CheckpointContents& contents);

/// Returns how many times tied tensors are stored again. DeepSpeed's files tie tensors of the
/// module, and tensors of what the user saved, but nothing across the two, and nothing of the
/// optimizer.
std::size_t num_split_ties(const CheckpointContents& contents);

}  // namespace tessera::formats::deepspeed
