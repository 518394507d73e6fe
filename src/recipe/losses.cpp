#include "recipe/losses.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>

#include "base/size_text.h"
#include "formats/quantized_tensors.h"
#include "tessera/base/error.h"

namespace tessera::recipe {
namespace {

using formats::Alias;
using formats::CheckpointContents;
using formats::Finding;
using formats::KeyPath;
using formats::Simplification;
using formats::TensorEntry;
using formats::ValueEntry;

/// An entry of the source that the recipe keeps, with its old name and one of its new names.
struct RenamedEntry {
  std::string_view old_name;
  const formats::SharedKeyPath* old_path;
  std::string_view new_name;
};

/// Returns all entries that the recipe keeps, sorted by their old names.
std::vector<RenamedEntry> list_renamed(const Transformation& made,
                                       const CheckpointContents& source) {
  const std::set<std::string_view> dropped(made.dropped.begin(), made.dropped.end());
  std::vector<RenamedEntry> entries;
  const auto add = [&](const std::string& name, const formats::SharedKeyPath& path) {
    const auto renamed = made.new_names.find(name);
    if (renamed == made.new_names.end()) {
      if (!dropped.contains(name)) entries.push_back({name, &path, name});
      return;
    }
    for (const std::string& each : renamed->second) entries.push_back({name, &path, each});
  };
  for (const TensorEntry& tensor : source.tensors) add(tensor.meta.fqn, tensor.key_path);
  for (const Alias& alias : source.aliases) add(alias.fqn, alias.key_path);
  for (const ValueTarget& target : made.values) {
    for (const std::size_t index : target.sources) {
      const ValueEntry& value = source.values[index];
      entries.push_back({value.name, &value.key_path, target.entry.name});
    }
  }
  std::ranges::stable_sort(entries, {}, &RenamedEntry::old_name);
  return entries;
}

Finding note(std::string rule, const std::string& path, std::string expected, std::string found) {
  return {.severity = Finding::Severity::note,
          .rule = std::move(rule),
          .where = {.path = path},
          .expected = std::move(expected),
          .found = std::move(found)};
}

/// Returns `2 tensors (a, …)`; an empty text if there are no names.
std::string counted_names(const std::set<std::string_view>& names, std::string_view one,
                          std::string_view many) {
  if (names.empty()) return {};
  return counted(names.size(), one, many) + " (" + printable(*names.begin()) +
         (names.size() > 1 ? ", …)" : ")");
}

void note_dropped(const Transformation& made, const CheckpointContents& source,
                  const std::string& path, std::vector<Finding>& notes) {
  std::set<std::string_view> tensors;
  std::set<std::string_view> values;
  std::set<std::string_view> aliases;
  std::uint64_t num_elements = made.num_dropped_elements;
  std::set<std::string_view> names_of_values;
  for (const ValueEntry& value : source.values) names_of_values.insert(value.name);
  const std::set<std::string_view> dropped(made.dropped.begin(), made.dropped.end());
  std::set<std::string_view> kept;  // tensors of which another name is kept
  for (const Alias& alias : source.aliases) {
    if (!dropped.contains(alias.fqn)) kept.insert(alias.target);
  }
  for (const std::string& name : made.dropped) {
    const TensorEntry* tensor = kept.contains(name) ? nullptr : source.find_tensor(name);
    if (tensor != nullptr) {
      if (tensors.insert(name).second) {
        num_elements -= static_cast<std::uint64_t>(tensor->meta.numel());
      }
    } else {
      (names_of_values.contains(name) ? values : aliases).insert(name);
    }
  }
  std::string found;
  const auto add = [&](const std::string& what) {
    if (!what.empty()) found += (found.empty() ? "" : ", ") + what;
  };
  add(counted_names(tensors, "tensor", "tensors"));
  add(counted_names(values, "value", "values"));
  add(counted_names(aliases, "alias", "aliases"));
  if (num_elements > 0) {
    add(counted(num_elements, "element") + " of slices and paddings");
  }
  if (found.empty()) return;
  notes.push_back(note("recipe", path, "rules that keep all entries and elements of the source",
                       found + " left out by its rules"));
}

/// Adds a note if rules drop tensors, and nothing tells which state under numbers is theirs.
void note_numbered_state(const Transformation& made, const CheckpointContents& source,
                         const std::string& path, std::vector<Finding>& notes) {
  const auto is_numbered = [&](const std::string& name) {
    return made.state_names->is_of_number(name);
  };
  if (!made.state_names || made.dropped.empty() || std::ranges::all_of(made.dropped, is_numbered)) {
    return;
  }
  std::set<std::string_view> kept;
  for (const Target& target : made.targets) {
    const std::string& name = target.entry.meta.fqn;
    if (target.rule == 0 && target.entry.parameter.empty() && is_numbered(name) &&
        source.find_tensor(name) != nullptr) {
      kept.insert(name);
    }
  }
  if (kept.empty()) return;
  Finding about_state = note("state", path, "state that is left out with its parameter",
                             counted_names(kept, "tensor", "tensors") +
                                 " of state under numbers, also of parameters that are left out");
  about_state.remedy = {Remedy::Action::name_params};
  notes.push_back(std::move(about_state));
}

/// Adds a note about tensors to which the recipe adds a number.
void note_additions(const Transformation& made, const std::string& path,
                    std::vector<Finding>& notes) {
  std::set<std::string_view> names;
  for (const Target& target : made.targets) {
    const bool is_changed = std::ranges::any_of(target.tensor.blocks, [](const Block& block) {
      return block.source != kConstant && block.added != 0;
    });
    if (is_changed) names.insert(target.entry.meta.fqn);
  }
  if (names.empty()) return;
  notes.push_back(note("add", path, "the same numbers after the inverse",
                       "additions to " + counted_names(names, "tensor", "tensors") +
                           ", which round: the last bits may change"));
}

/// The index of a source tensor, and the name of a new tensor.
using Placed = std::pair<std::uint32_t, std::string_view>;

/// Returns how many elements of each source tensor are in each new tensor. An element that is there
/// several times counts several times.
std::map<Placed, std::int64_t> count_placed(const Transformation& made) {
  std::map<Placed, std::int64_t> num_placed;
  for (const Target& target : made.targets) {
    for (const Block& block : target.tensor.blocks) {
      if (block.source == kConstant) continue;
      num_placed[{block.source, target.entry.meta.fqn}] += block.box.numel();
    }
  }
  return num_placed;
}

/// Adds a note about tied tensors that become two separate tensors.
void note_split_ties(const Transformation& made, const CheckpointContents& source,
                     const std::vector<RenamedEntry>& entries, const std::string& path,
                     std::vector<Finding>& notes) {
  if (source.aliases.empty()) return;
  std::unordered_map<std::string_view, std::string_view> tensor_of;  // new tensor, by new name
  for (const Target& target : made.targets) {
    tensor_of.emplace(target.entry.meta.fqn, target.entry.meta.fqn);
  }
  for (const Alias& alias : made.aliases) tensor_of.emplace(alias.fqn, alias.target);
  const auto tensors_of = [&](std::string_view old_name) {
    std::set<std::string_view> tensors;
    for (const RenamedEntry& entry :
         std::ranges::equal_range(entries, old_name, {}, &RenamedEntry::old_name)) {
      const auto found = tensor_of.find(entry.new_name);
      if (found != tensor_of.end()) tensors.insert(found->second);
    }
    return tensors;
  };
  const std::map<Placed, std::int64_t> num_placed = count_placed(made);
  std::set<std::string_view> split;
  for (const Alias& alias : source.aliases) {
    const std::set<std::string_view> own = tensors_of(alias.fqn);
    const std::set<std::string_view> others = tensors_of(alias.target);
    if (own.empty() || others.empty()) continue;
    const TensorEntry& tensor = *source.find_tensor(alias.target);
    const auto index = static_cast<std::uint32_t>(&tensor - source.tensors.data());
    std::int64_t placed = 0;  // elements of the source tensor that are in `own`
    for (const std::string_view each : own) {
      const auto found = num_placed.find({index, each});
      if (found != num_placed.end()) placed += found->second;
    }
    const bool is_repeated = placed > tensor.meta.numel();
    if (own != others || is_repeated) split.insert(alias.fqn);
  }
  if (split.empty()) return;
  notes.push_back(
      note("recipe", path, "tied tensors that stay tied",
           counted_names(split, "tensor", "tensors") + " that rules turn into separate copies"));
}

/// Adds a note about quantized weights whose codes and scales loaders do not find together under
/// their new names.
void note_separated_codes(const Transformation& made, const CheckpointContents& source,
                          const std::string& path, std::vector<Finding>& notes) {
  const formats::QuantizedTensors parts(source);
  if (parts.empty()) return;
  CheckpointContents renamed;
  std::map<std::size_t, std::set<std::size_t>> places;  // new tensors, by source tensor
  for (const Target& target : made.targets) {
    for (const Block& block : target.tensor.blocks) {
      if (block.source != kConstant) places[block.source].insert(renamed.tensors.size());
    }
    renamed.tensors.push_back(target.entry);
  }
  renamed.aliases = made.aliases;
  for (const ValueTarget& value : made.values) renamed.values.push_back(value.entry);
  const formats::QuantizedTensors renamed_parts(renamed);
  std::set<std::string_view> separated;
  for (std::size_t i = 0; i < source.tensors.size(); ++i) {
    if (!parts.are_codes(i)) continue;
    const std::set<std::size_t>& scales = places[parts.find(i)->partner];
    const auto has_scales = [&](std::size_t place) {
      return renamed_parts.are_codes(place) && scales.contains(renamed_parts.find(place)->partner);
    };
    if (!std::ranges::all_of(places[i], has_scales)) separated.insert(source.tensors[i].meta.fqn);
  }
  if (separated.empty()) return;
  notes.push_back(note("quantized weights", path,
                       "names that show loaders which scales belong to which codes",
                       counted_names(separated, "weight", "weights") +
                           " whose codes have other scales or none under their new names"));
}

bool is_text(const formats::Key& key) {
  return std::holds_alternative<std::string>(key);
}

/// Adds a note about dict keys and list positions that become text.
void note_text_keys(const Transformation& made, const std::vector<RenamedEntry>& entries,
                    const std::string& path, std::vector<Finding>& notes) {
  std::unordered_map<std::string_view, const formats::SharedKeyPath*> paths;  // by new name
  for (const Target& target : made.targets) {
    paths.emplace(target.entry.meta.fqn, &target.entry.key_path);
  }
  for (const Alias& alias : made.aliases) paths.emplace(alias.fqn, &alias.key_path);
  for (const ValueTarget& value : made.values) {
    paths.emplace(value.entry.name, &value.entry.key_path);
  }
  std::set<std::string> changed;
  for (const RenamedEntry& entry : entries) {
    const auto found = paths.find(entry.new_name);
    if (found == paths.end() || entry.new_name == entry.old_name) continue;
    const formats::SharedKeyPath& old_path = *entry.old_path;
    for (std::size_t i = 0; i < old_path.size(); ++i) {
      if (is_text(old_path[i]) ||
          std::ranges::find(*found->second, old_path[i]) != found->second->end()) {
        continue;
      }
      const auto end = old_path.begin() + static_cast<std::ptrdiff_t>(i) + 1;
      changed.insert(formats::spell(KeyPath(old_path.begin(), end)));
    }
  }
  if (changed.empty()) return;
  notes.push_back(note(
      "recipe", path, "keys and positions in lists that keep their type",
      counted_names({changed.begin(), changed.end()}, "that becomes text", "that become text")));
}

/// Shortens `common` to its first components (parts between dots) that `name` also begins with.
void keep_common(std::string_view name, std::string& common) {
  while (!common.empty() && name != common &&
         !(name.starts_with(common) && name[common.size()] == '.')) {
    const std::size_t dot = common.rfind('.');
    common.resize(dot == std::string::npos ? 0 : dot);
  }
}

}  // namespace

std::vector<Finding> find_losses(const Transformation& made, const CheckpointContents& source,
                                 const std::string& path) {
  std::vector<Finding> notes;
  const std::vector<RenamedEntry> entries = list_renamed(made, source);
  note_dropped(made, source, path, notes);
  note_numbered_state(made, source, path, notes);
  note_additions(made, path, notes);
  note_split_ties(made, source, entries, path, notes);
  note_separated_codes(made, source, path, notes);
  note_text_keys(made, entries, path, notes);
  return notes;
}

std::vector<Simplification> renamed_simplifications(const Transformation& made,
                                                    const CheckpointContents& source) {
  std::vector<Simplification> result;
  if (source.simplifications.empty()) return result;
  const std::vector<RenamedEntry> entries = list_renamed(made, source);
  for (const Simplification& simplified : source.simplifications) {
    const std::string& name = simplified.name;
    const auto of_entry =
        std::ranges::equal_range(entries, std::string_view(name), {}, &RenamedEntry::old_name);
    for (const RenamedEntry& entry : of_entry) {
      result.push_back({simplified.kind, std::string(entry.new_name), simplified.what});
    }
    if (!of_entry.empty()) continue;
    if (name.empty()) {
      result.push_back(simplified);
      continue;
    }
    const std::string prefix = name + ".";
    auto entry =
        std::ranges::lower_bound(entries, std::string_view(prefix), {}, &RenamedEntry::old_name);
    if (entry == entries.end() || !entry->old_name.starts_with(prefix)) continue;
    std::string common(entry->new_name);
    for (; entry != entries.end() && entry->old_name.starts_with(prefix); ++entry) {
      keep_common(entry->new_name, common);
    }
    result.push_back({simplified.kind, std::move(common), simplified.what});
  }
  return result;
}

}  // namespace tessera::recipe
