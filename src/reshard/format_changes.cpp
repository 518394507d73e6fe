#include "reshard/format_changes.h"

#include <algorithm>
#include <map>
#include <set>
#include <span>
#include <string>
#include <variant>

#include "formats/key_order.h"
#include "formats/own_annotations.h"
#include "tessera/base/error.h"
#include "tessera/formats/format_driver.h"
#include "tessera/reshard/job_state.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointContents;
using formats::FormatTraits;
using formats::Key;
using formats::KeyPath;
using formats::NonStringKey;
using formats::Simplification;
using Counts = std::map<FormatChange, std::size_t>;
using Names = std::map<FormatChange, std::set<std::string>>;

/// Calls `visit(key path)` for every tensor, value and alias. The path may be empty.
template <class Visit>
void for_each_path(const CheckpointContents& contents, const Visit& visit) {
  for (const auto& tensor : contents.tensors) visit(tensor.key_path);
  for (const auto& value : contents.values) visit(value.key_path);
  for (const auto& alias : contents.aliases) visit(alias.key_path);
}

/// Returns what changes if the last key of `path`, which is not a string, becomes text: an
/// optimizer key if the key before it is `state` (then it is a parameter's number), else a dict
/// key.
FormatChange change_of_key(std::span<const Key> path) {
  const bool is_in_state = path.size() > 1 && path[path.size() - 2] == Key("state");
  return is_in_state ? FormatChange::optimizer_keys : FormatChange::text_keys;
}

/// Counts the dict keys that are not strings. A key counts once for each dict that has it.
void count_keys(const CheckpointContents& destination, Counts& counts) {
  std::set<KeyPath> seen;
  for_each_path(destination, [&](const KeyPath& path) {
    for (std::size_t i = 0; i < path.size(); ++i) {
      if (!std::holds_alternative<NonStringKey>(path[i])) continue;
      const auto end = path.begin() + static_cast<std::ptrdiff_t>(i) + 1;
      if (!seen.insert(KeyPath(path.begin(), end)).second) continue;
      ++counts[change_of_key(std::span(path).first(i + 1))];
    }
  });
}

bool is_list_at_root(const CheckpointContents& destination) {
  bool is_list = false;
  for_each_path(destination, [&](const KeyPath& path) {
    is_list = is_list || (!path.empty() && std::holds_alternative<std::int64_t>(path.front()));
  });
  return is_list;
}

/// Returns how many tensors of the destination are further copies of a source tensor: an earlier
/// tensor of the destination is already a copy of the same source tensor.
std::size_t num_repeated(const Plan& plan, std::size_t num_source_tensors) {
  std::vector<bool> is_seen(num_source_tensors);
  std::size_t num_repeated = 0;
  for (const TensorCopy& copy : plan.copies) {
    if (is_seen[copy.source_tensor]) ++num_repeated;
    is_seen[copy.source_tensor] = true;
  }
  return num_repeated;
}

/// Returns how many annotations of the source may be a user's own.
std::size_t num_annotations(const CheckpointContents& source) {
  const auto is_of_user = [](const auto& annotation) {
    return !formats::is_own_annotation(annotation.first, annotation.second);
  };
  return static_cast<std::size_t>(std::ranges::count_if(source.annotations, is_of_user));
}

/// Returns how many `step` entries of optimizers are values, not tensors.
std::size_t num_number_steps(const CheckpointContents& destination) {
  const auto is_step = [](const formats::ValueEntry& value) {
    return value.name.starts_with("optim.state.") && value.name.ends_with(".step");
  };
  return static_cast<std::size_t>(std::ranges::count_if(destination.values, is_step));
}

/// Returns the names that the moved entries have in the source.
std::set<std::string> names_moved(const Plan& plan, const CheckpointContents& source,
                                  const MovedSelection& selection) {
  std::set<std::string> moved;
  std::set<std::string_view> tensors;  // names of tensors of which any name is moved
  for (const TensorCopy& copy : plan.copies) {
    tensors.insert(source.tensors[copy.source_tensor].meta.fqn);
  }
  for (const std::string_view name : tensors) {
    if (selection.contains(name)) moved.emplace(name);
  }
  for (const formats::Alias& alias : source.aliases) {
    if (tensors.contains(alias.target) && selection.contains(alias.fqn)) moved.insert(alias.fqn);
  }
  for (const std::size_t value : plan.value_sources) moved.insert(source.values[value].name);
  return moved;
}

/// Counts, in the entries that are moved, what the reader has simplified (Simplification).
void count_simplifications(const Plan& plan, const CheckpointContents& source,
                           const MovedSelection& selection, Counts& counts, Names& names) {
  if (source.simplifications.empty()) return;
  const std::set<std::string> moved = names_moved(plan, source, selection);
  const bool is_empty = source.tensors.empty() && source.values.empty();
  const bool has_attributes = std::ranges::any_of(
      source.simplifications,
      [](const Simplification& each) { return each.kind == Simplification::Kind::attributes; });
  std::set<std::string> in_source;  // only if attributes need it: a model has many names
  if (has_attributes) {
    for (const formats::TensorEntry& tensor : source.tensors) in_source.insert(tensor.meta.fqn);
    for (const formats::Alias& alias : source.aliases) in_source.insert(alias.fqn);
    for (const formats::ValueEntry& value : source.values) in_source.insert(value.name);
  }
  const auto has_at_or_below = [](const std::set<std::string>& entries, const std::string& name) {
    if (entries.contains(name)) return true;
    const std::string prefix = name + ".";
    const auto next = entries.lower_bound(prefix);
    return next != entries.end() && next->starts_with(prefix);
  };
  const auto is_moved = [&](Simplification::Kind kind, const std::string& name) {
    if (name.empty()) return !moved.empty() || is_empty;
    if (has_at_or_below(moved, name)) return true;
    // A module without parameters and buffers has no entry that could be moved. Its attributes are
    // lost if its name is selected.
    return kind == Simplification::Kind::attributes && !has_at_or_below(in_source, name) &&
           selection.contains(name);
  };
  for (const auto& [kind, name, what] : source.simplifications) {
    if (kind == Simplification::Kind::dtensor_of_rank || !is_moved(kind, name)) continue;
    ++counts[change_of(kind)];
    if (!what.empty()) names[change_of(kind)].insert(what.begin(), what.end());
  }
}

}  // namespace

FormatChange change_of(Simplification::Kind kind) {
  switch (kind) {
    case Simplification::Kind::requires_grad:
      return FormatChange::requires_grad;
    case Simplification::Kind::parameter:
      return FormatChange::parameters;
    case Simplification::Kind::shared_memory:
      return FormatChange::shared_memory;
    case Simplification::Kind::dict_class:
      return FormatChange::dict_classes;
    case Simplification::Kind::tuple:
      return FormatChange::tuples;
    case Simplification::Kind::attributes:
      return FormatChange::attributes;
    case Simplification::Kind::value_type:
      return FormatChange::value_types;
    case Simplification::Kind::dtensor:
    case Simplification::Kind::dtensor_of_rank:
      return FormatChange::dtensors;
  }
  TESSERA_CHECK(false && "unnamed Simplification::Kind");
  return {};
}

std::string_view format_change_name(FormatChange change) {
  switch (change) {
    case FormatChange::text_keys:
      return "text_keys";
    case FormatChange::optimizer_keys:
      return "optimizer_keys";
    case FormatChange::split_ties:
      return "split_ties";
    case FormatChange::list_root:
      return "list_root";
    case FormatChange::annotations:
      return "annotations";
    case FormatChange::requires_grad:
      return "requires_grad";
    case FormatChange::parameters:
      return "parameters";
    case FormatChange::shared_memory:
      return "shared_memory";
    case FormatChange::dict_classes:
      return "dict_classes";
    case FormatChange::tuples:
      return "tuples";
    case FormatChange::attributes:
      return "attributes";
    case FormatChange::value_types:
      return "value_types";
    case FormatChange::dtensors:
      return "dtensors";
    case FormatChange::tensor_steps:
      return "tensor_steps";
    case FormatChange::key_order:
      return "key_order";
    case FormatChange::nested_keys:
      return "nested_keys";
    case FormatChange::model_names:
      return "model_names";
  }
  TESSERA_CHECK(false && "unnamed FormatChange");
  return {};
}

std::vector<FormatChangeCount> count_save_changes(const CheckpointContents& contents,
                                                  std::size_t num_aliases, formats::Format format) {
  const FormatTraits traits = formats::traits_of(format);
  Counts counts;
  if (!traits.holds_key_types) count_keys(contents, counts);
  if (!traits.holds_aliases && num_aliases > 0) counts[FormatChange::split_ties] = num_aliases;
  std::vector<FormatChangeCount> found;
  for (const auto& [change, count] : counts) found.push_back({.change = change, .count = count});
  return found;
}

std::vector<FormatChangeCount> count_format_changes(const Plan& plan,
                                                    const CheckpointContents& source,
                                                    const MovedSelection& selection,
                                                    const std::set<KeyPath>& renamed_keys,
                                                    const PlanOptions& options) {
  const FormatTraits traits = formats::traits_of(options.format);
  Counts counts;
  if (!traits.holds_key_types) count_keys(plan.destination, counts);
  Counts by_rename;
  for (const KeyPath& path : renamed_keys) ++by_rename[change_of_key(path)];
  for (const auto& [change, count] : by_rename) counts[change] += count;
  if (!traits.holds_aliases) {
    counts[FormatChange::split_ties] = num_repeated(plan, source.tensors.size());
  }
  if (!traits.holds_list_roots) {
    counts[FormatChange::list_root] = is_list_at_root(plan.destination) ? 1 : 0;
  }
  if (!traits.holds_annotations) {
    counts[FormatChange::annotations] = num_annotations(source);
  }
  if (!traits.holds_number_steps) {
    counts[FormatChange::tensor_steps] = num_number_steps(plan.destination);
  }
  if (!traits.holds_key_order) {
    counts[FormatChange::key_order] = formats::num_reordered_dicts(plan.destination);
  }
  const auto outermost = formats::driver_of(options.format).outermost_changes(plan.destination);
  if (outermost.reorders_keys) counts[FormatChange::key_order] = 1;
  counts[FormatChange::nested_keys] = outermost.num_nested_keys;
  counts[FormatChange::model_names] = outermost.num_model_names;
  counts[FormatChange::split_ties] += outermost.num_split_ties;
  counts[FormatChange::key_order] += options.num_unordered_dicts;
  Names names;
  count_simplifications(plan, source, selection, counts, names);
  if (traits.holds_dtensors) counts.erase(FormatChange::dtensors);
  std::vector<FormatChangeCount> found;
  for (const auto& [change, count] : counts) {
    if (count == 0) continue;
    FormatChangeCount& counted = found.emplace_back(FormatChangeCount{change, count});
    counted.by_rename = by_rename[change];
    counted.names.assign(names[change].begin(), names[change].end());
  }
  return found;
}

}  // namespace tessera::reshard
