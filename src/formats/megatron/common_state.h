#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::megatron {

/// What Megatron keeps in `common.pt` of a torch_dist checkpoint: all that is equal on all ranks,
/// except weights. A missing member gets a default with which Megatron can load the checkpoint.
/// Source: megatron-core 0.16, optimizer/optimizer.py, optimizer/distrib_optimizer.py;
/// Megatron-LM, megatron/training/checkpointing.py. Not thread-safe.
class CommonState {
 public:
  /// `destination`: the path in messages.
  explicit CommonState(std::string destination) : destination_(std::move(destination)) {}

  /// Adds a value at a path of the nested dicts. `args.<name>` becomes an attribute of a Namespace.
  /// The keys of a dict get the order in which they are added.
  void add(KeyPath path, Value value) {
    entries_.push_back({std::move(path), std::move(value), next_order_++});
  }
  /// Adds a tensor at a path. The caller passes its elements to `pickled`, as `bytes[number]`.
  void add_tensor(KeyPath path, TensorMeta meta, std::size_t number) {
    tensors_.push_back({std::move(path), std::move(meta), number, next_order_++});
  }
  /// Adds a field of a parameter group of the optimizer, or an entry of a dict in it. `path`: the
  /// keys below the group. Do not pass `params`.
  void add_group_field(std::int64_t group, KeyPath path, Value value) {
    groups_[group].fields.push_back({std::move(path), std::move(value)});
  }
  /// Adds a parameter that the source lists in a group.
  void add_group_parameter(std::int64_t group, std::string name) {
    groups_[group].parameters.push_back(std::move(name));
  }
  /// Returns the parameters whose fields change because Megatron makes new groups when it starts:
  /// one with weight decay, and one without. They get the fields of the source's other group. If
  /// the source has only a group with weight decay, they lose the decay. Returns an empty list if
  /// Megatron saved the groups. `decays`: whether Megatron gives a parameter weight decay. Throws:
  /// Error(unsupported) if the source has two groups with weight decay, or two without.
  std::vector<std::string> regrouped(const std::function<bool(const std::string&)>& decays) const;
  /// Records the number of steps of a parameter.
  /// Throws: Error(unsupported) naming the parameter if another parameter has a different number,
  /// because Megatron keeps one number for all.
  void set_step(const std::string& name, double step);

  /// States that the checkpoint has optimizer state. `has_experts`: also state of experts.
  void set_optimizer(bool has_experts) {
    has_optimizer_ = true;
    has_experts_ = has_experts;
  }
  void set_layers_stacked(bool are_stacked) { are_layers_stacked_ = are_stacked; }
  /// Returns the value at a path; null if the source has none there.
  const Value* find(const KeyPath& path) const;
  /// Returns the value of the argument `name`; null if the source has none.
  const Value* find_arg(std::string_view name) const;

  /// Returns the bytes of `common.pt`. `bytes`: the elements of each tensor, by its number.
  /// Throws: Error(unsupported) if the groups of the optimizer do not fit Megatron's, or for a
  /// value that cannot be pickled.
  std::string pickled(const std::map<std::size_t, std::string>& bytes) const;
  /// Throws what `pickled` will throw. Can be called before `set_step` for steps that are tensors.
  void check() const;

 private:
  struct Entry {
    KeyPath path;
    Value value;
    std::uint32_t order = 0;
  };
  struct Tensor {
    KeyPath path;
    TensorMeta meta;
    std::size_t number;
    std::uint32_t order = 0;
  };
  struct Field {
    KeyPath path;
    Value value;
  };
  /// A parameter group: its fields, in their order.
  struct Group {
    std::vector<Field> fields;
    std::vector<std::string> parameters;  // the source's names

    bool has(std::string_view name) const;
    const Value* find(std::string_view name) const;  // null if missing or a dict
    void add_missing(std::string name, Value value);
    void set(const std::string& name, Value value);
  };
  struct GroupKind {
    bool is_decayed = true;
    bool is_of_experts = false;
  };
  /// What is pickled.
  struct Contents {
    std::vector<Entry> entries;
    std::vector<Tensor> tensors;
    std::uint32_t next_order;

    bool has(const KeyPath& path) const;
    void add(KeyPath path, Value value);
    void set(const KeyPath& path, Value value);
  };

  static bool is_decayed(const Group& group);
  bool are_groups_from_megatron() const;
  std::array<const Group*, 2> groups_by_decay() const;
  std::vector<Group> groups_for_megatron() const;
  Group completed(Group group, GroupKind kind) const;
  void add_optimizer(Contents& contents) const;
  static void put_optimizer_before_its_scheduler(Contents& contents);
  void add_iteration(Contents& contents) const;
  Contents completed_contents() const;

  std::string destination_;
  std::vector<Entry> entries_;
  std::vector<Tensor> tensors_;
  std::uint32_t next_order_ = 1;
  std::map<std::int64_t, Group> groups_;
  std::optional<double> step_;
  std::string name_of_step_;
  bool has_optimizer_ = false;
  bool has_experts_ = false;
  bool are_layers_stacked_ = true;  // one tensor holds a weight of all layers
};

/// Returns the number in a value; nothing if the value is no number.
std::optional<double> as_number(const Value& value);

}  // namespace tessera::formats::megatron
