#include "tessera/reshard/planner.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/size_text.h"
#include "formats/own_annotations.h"
#include "formats/per_rank.h"
#include "reshard/destination_layout.h"
#include "reshard/destination_names.h"
#include "reshard/destination_units.h"
#include "reshard/format_changes.h"
#include "reshard/model_names.h"
#include "reshard/moved_names.h"
#include "reshard/own_entries.h"
#include "reshard/plan_report.h"
#include "reshard/quantized_names.h"
#include "reshard/source_check.h"
#include "reshard/source_gaps.h"
#include "reshard/table_plan_check.h"
#include "reshard/tensor_planner.h"
#include "tessera/formats/format_driver.h"

// Makes a plan in stages. Each stage has a file of its own.
namespace tessera::reshard {
namespace {

using formats::CheckpointContents;

void plan_values(const CheckpointContents& source, std::span<const MovedValue> values,
                 const PlanOptions& options, const SourceGaps& gaps, Plan& plan,
                 PlanReport& report) {
  for (const MovedValue& value : values) {
    if (!can_give_value(source, value.source_value, gaps, options.missing, report)) continue;
    plan.destination.values.push_back(value.entry);
    plan.value_sources.push_back(value.source_value);
  }
}

void plan_tensors(const CheckpointContents& source, const PlanOptions& options,
                  const SourceGaps& gaps, const LayoutRule& rule, std::span<const FlatUnit> units,
                  std::vector<MovedTensor>& moved, Plan& plan, PlanReport& report) {
  const std::vector<StateRole> roles = classify_state(source);
  const DestinationLayout layout(source, options, rule, units, roles);
  TensorPlanner tensor_planner(source, options, gaps, layout, roles, moved, plan, report);
  plan.destination.tensors.reserve(moved.size());
  plan.copies.reserve(moved.size());
  for (MovedTensor& each : moved) {
    // Only check_table_plan needs it later. Otherwise frees its name, whose memory the next
    // tensor's name gets.
    const MovedTensor tensor = options.table_plan ? each : std::move(each);
    tensor_planner.plan_tensor(tensor);
  }
  tensor_planner.finish();
  if (!options.table_plan) moved = {};
}

/// Adds a note about entries such as `per_rank.3.rng` that do not become rank 3's value of `rng`.
void note_separate_own_entries(const CheckpointContents& destination, PlanReport& report) {
  const std::vector<std::string> names = find_separate_own_entries(destination);
  if (names.empty()) return;
  const std::string others =
      names.size() == 1 ? "" : " (and " + std::to_string(names.size() - 1) + " more)";
  report.note(
      "ranks", names.front(),
      "in the destination, this rank and an entry that is not cut, with the name after "
      "'per_rank.<rank>.'",
      "not both, so the entry keeps its own name and is no longer that of one rank" + others);
}

/// Adds a note if ranks of the source have values of their own, such as the state of a random
/// generator, and the destination has more ranks: the others get the values of the lowest rank.
void note_ranks_without_own_entries(const CheckpointContents& source,
                                    const CheckpointContents& destination, PlanReport& report) {
  int num_ranks = source.world_size;
  std::string first;
  const auto add = [&](const std::string& name) {
    const auto own = formats::parse_per_rank_name(name);
    if (!own) return;
    num_ranks = std::max(num_ranks, own->rank + 1);
    if (first.empty()) first = own->name;
  };
  for (const formats::TensorEntry& tensor : destination.tensors) add(tensor.meta.fqn);
  for (const formats::ValueEntry& value : destination.values) add(value.name);
  if (first.empty() || destination.world_size <= num_ranks) return;
  report.note("ranks", first,
              "no more ranks than the " + std::to_string(num_ranks) +
                  " of the source, which have values of their own under this name",
              std::to_string(destination.world_size) + ": ranks from " + std::to_string(num_ranks) +
                  " on get the values of the lowest rank (a random generator gives them the same "
                  "numbers; seed it anew)");
}

/// Reports entries of a user's dict `per_rank` whose keys are numbers. In files of ranks, their
/// names would be those of the ranks' own values.
void refuse_numbers_as_ranks(const CheckpointContents& destination, PlanReport& report) {
  const auto check = [&](const std::string& name, const formats::KeyPath& path) {
    if (path.size() < 2 || std::holds_alternative<std::string>(path[1])) return true;
    if (!formats::parse_per_rank_name(name)) return true;
    report.problem("ranks", name, "text as the keys of 'per_rank', as Tessera writes it for ranks",
                   "a number: an entry of the user's (rename 'per_rank.', for "
                   "example to 'ranks.')");
    return false;
  };
  for (const formats::TensorEntry& tensor : destination.tensors) {
    if (!check(tensor.meta.fqn, tensor.key_path)) return;  // once is enough
  }
  for (const formats::ValueEntry& value : destination.values) {
    if (!check(value.name, value.key_path)) return;
  }
}

/// Adds a note about a text that the destination keeps and that names tensors which are left out or
/// renamed. torchao has such texts in a safetensors file's `__metadata__`: what each tensor is, and
/// `tensor_names`.
void note_texts_with_names(const CheckpointContents& source, const Plan& plan, PlanReport& report) {
  const CheckpointContents& destination = plan.destination;
  const auto is_gone = [&](const std::string& name) {
    const auto is_alias = [&](const formats::Alias& alias) { return alias.fqn == name; };
    return destination.find_tensor(name) == nullptr &&
           std::ranges::none_of(destination.aliases, is_alias);
  };
  const auto names_what_is_gone = [&](const std::string& key) {
    if (source.find_tensor(key) != nullptr) return is_gone(key);
    return key == "tensor_names" &&
           std::ranges::any_of(source.tensors, [&](const formats::TensorEntry& tensor) {
             return is_gone(tensor.meta.fqn);
           });
  };
  std::vector<std::string> keys;
  for (const auto& [key, text] : destination.annotations) {
    if (names_what_is_gone(key)) keys.push_back(key);
  }
  if (keys.empty()) return;
  report.note(
      "metadata", "", "texts that name the tensors of the destination",
      counted(keys.size(), "text") + " with names of tensors of the source, such as '" +
          printable(keys.front()) +
          "' (kept unchanged; a loader that needs them, such as torchao's, may refuse them)");
}

/// Adds a note about second names of tied tensors, if other loaders than Tessera do not find them.
void note_hidden_names(const CheckpointContents& destination, PlanReport& report) {
  if (destination.aliases.empty()) return;
  const formats::Alias& first = destination.aliases.front();
  const std::size_t num_others = destination.aliases.size() - 1;
  report.note(
      "tied names", first.fqn, "a tensor of this name, for other loaders than Tessera",
      "a second name of '" + printable(first.target) + "', which alone is stored" +
          (num_others == 0 ? std::string()
                           : " (and " + counted(num_others, "more name") + " of tied tensors)") +
          "; a model that does not tie them itself, as transformers does with "
          "tie_word_embeddings, misses it");
}

/// Adds a note if a rename gives an entry a name that seems to be inside a value: `head.w` beside
/// the value `head`, which may be an empty dict. The entry does not go into it, because a plan does
/// not know what values are.
void note_keys_beside_values(const CheckpointContents& source, const Plan& plan,
                             PlanReport& report) {
  std::set<std::string_view> values;
  for (const formats::ValueEntry& value : plan.destination.values) values.insert(value.name);
  std::size_t num_beside = 0;
  std::string first;
  std::string_view first_value;
  const auto add = [&](const std::string& name, const std::string& source_name) {
    if (name == source_name) return;
    for (std::size_t dot = name.find('.'); dot != std::string::npos;
         dot = name.find('.', dot + 1)) {
      const auto value = values.find(std::string_view(name).substr(0, dot));
      if (value == values.end()) continue;
      if (num_beside++ == 0) {
        first = name;
        first_value = *value;
      }
      return;
    }
  };
  for (std::size_t i = 0; i < plan.copies.size(); ++i) {
    add(plan.destination.tensors[i].meta.fqn,
        source.tensors[plan.copies[i].source_tensor].meta.fqn);
  }
  for (std::size_t i = 0; i < plan.value_sources.size(); ++i) {
    add(plan.destination.values[i].name, source.values[plan.value_sources[i]].name);
  }
  if (num_beside == 0) return;
  report.note("rename", first, "a dict '" + printable(first_value) + "' to put it into",
              "a value of this name (an empty dict is one), so '" + printable(first) +
                  "' is a key beside it" +
                  (num_beside == 1 ? std::string()
                                   : " (and " + counted(num_beside - 1, "more name") + ")"));
}

/// Adds a note about positions of lists that have no entry, because patterns left it out. Leaves
/// out lists of single ranks, whose other items are those that all ranks share.
void note_gaps_in_lists(const CheckpointContents& destination, PlanReport& report) {
  std::map<formats::KeyPath, std::set<std::int64_t>> lists;  // by the list's key path
  const auto add = [&](const std::string& name, const formats::KeyPath& path) {
    for (std::size_t depth = 0; depth < path.size(); ++depth) {
      const auto* const position = std::get_if<std::int64_t>(&path[depth]);
      if (position == nullptr || formats::parse_per_rank_name(name)) continue;
      const auto end = path.begin() + static_cast<std::ptrdiff_t>(depth);
      lists[formats::KeyPath(path.begin(), end)].insert(*position);
    }
  };
  for (const formats::TensorEntry& tensor : destination.tensors) {
    add(tensor.meta.fqn, tensor.key_path);
  }
  for (const formats::Alias& alias : destination.aliases) add(alias.fqn, alias.key_path);
  for (const formats::ValueEntry& value : destination.values) add(value.name, value.key_path);
  std::uint64_t num_gaps = 0;
  std::string first;
  for (const auto& [list, positions] : lists) {
    if (*positions.begin() < 0) continue;  // writers refuse it
    const std::uint64_t num_positions = static_cast<std::uint64_t>(*positions.rbegin()) + 1;
    const std::uint64_t num_missing = num_positions - positions.size();
    if (num_missing > 0 && num_gaps == 0) first = formats::spell(list);
    num_gaps += num_missing;
  }
  if (num_gaps == 0) return;
  report.note("lists", first, "an entry at each position before the last",
              counted(num_gaps, "position") + " without one, which " +
                  (num_gaps == 1 ? "becomes" : "become") + " None when the list is loaded");
}

/// Adds a note about FSDP1's flat optimizer state in files of other ranks than those of the source.
void note_flat_state(const CheckpointContents& source, const Plan& plan, PlanReport& report) {
  std::uint64_t count = 0;
  const std::string* first = nullptr;
  const std::string* first_kept = nullptr;
  bool has_cut_tensor = false;
  for (std::size_t i = 0; i < plan.copies.size(); ++i) {
    const formats::TensorEntry& entry = plan.destination.tensors[i];
    if (entry.pieces.empty()) continue;
    if (!is_flat_state(entry, source.tensors[plan.copies[i].source_tensor])) {
      has_cut_tensor =
          has_cut_tensor || numel_of(entry.pieces.front().region) != numel_of(entry.meta.shape);
      continue;
    }
    if (std::holds_alternative<FlatRange>(entry.pieces.front().region)) {
      if (first_kept == nullptr) first_kept = &entry.meta.fqn;
    } else if (count++ == 0) {
      first = &entry.meta.fqn;
    }
  }
  if (first_kept != nullptr && !has_cut_tensor) {
    report.note(
        "ranks", *first_kept, "the model's sharded tensors beside ranges of flat optimizer state",
        "none: FSDP1 loads these files, but Tessera takes each rank's range for a tensor of "
        "its own (move the model and the optimizer together)");
  }
  if (count == 0) return;
  report.note("ranks", *first,
              "the " + std::to_string(source.world_size) +
                  " ranks of the source, whose ranges of flat parameters FSDP1 loads",
              counted(count, "vector") + " of optimizer state that " + (count == 1 ? "is" : "are") +
                  " whole or cut in another way, for " +
                  counted(static_cast<std::uint64_t>(plan.destination.world_size), "rank") +
                  ", which FSDP1 cannot load (move without the optimizer)");
}

/// Adds a note about flat units that the destination does not record, though some of their
/// parameters are moved.
void note_lost_units(const CheckpointContents& source, const Plan& plan, formats::Format format,
                     PlanReport& report) {
  if (source.units.empty()) return;
  std::set<std::string_view> moved;
  for (const TensorCopy& copy : plan.copies) {
    moved.insert(source.tensors[copy.source_tensor].meta.fqn);
  }
  const auto is_moved = [&](const FlatUnit& unit) {
    return std::ranges::any_of(
        unit.parameters, [&](const FlatUnitParameter& each) { return moved.contains(each.fqn); });
  };
  const auto num_moved = static_cast<std::size_t>(std::ranges::count_if(source.units, is_moved));
  const formats::FormatTraits traits = formats::traits_of(format);
  const bool holds_units =
      traits.holds_flat_units && traits.pieces != formats::FormatTraits::Pieces::whole_tensors;
  const std::size_t num_kept = holds_units ? plan.destination.units.size() : 0;
  if (num_moved <= num_kept) return;
  report.note("units", "", "a format that records flat units, and all parameters of each unit",
              counted(num_moved - num_kept, "unit") +
                  " left out: the destination does not say which parameters FSDP1 keeps together");
}

}  // namespace

Plan plan_reshard(const CheckpointContents& source, const std::string& source_path,
                  const PlanOptions& options, const SourceGaps& gaps) {
  Plan plan;
  PlanReport report(plan, source_path);
  CheckpointContents& destination = plan.destination;

  const LayoutRule rule = choose_layout_rule(source, options);
  destination.world_size = rule.world_size;

  const MovedSelection selection(source, options);
  MovedNames moved = list_moved_names(source, options, selection);
  plan.left_out = count_left_out(source, moved, selection);
  report_missing_files(source, options.missing, report);
  report_opening_findings(source, options.missing, report);
  note_opened_classes(source, report);
  report_part(source, options.part, report);
  check_patterns_match(source, options, selection, report);
  note_state_under_other_names(source, options, selection, report);
  note_groups_with_old_names(source, moved, options, report);
  note_state_of_renamed_parameters(source, moved, selection, options, report);
  note_numbers_in_text(source, moved, options.format, report);
  note_numbers_of_renamed_parameters(source, moved, options, report);
  note_renames_within_numbers(source, moved, options, report);
  note_kept_state(moved, selection, report);
  note_state_without_table_rule(source, moved, selection, report);
  if (options.optimizer == OptimizerSelection::leave_out && moved.tensors.empty() &&
      !source.tensors.empty()) {
    report.note("optimizer left out", "", "tensors other than optimizer state",
                "none: only values are moved");
  }

  const std::vector<FlatUnit> units = choose_units(source, options, rule.strategy, report);
  plan_tensors(source, options, gaps, rule, units, moved.tensors, plan, report);
  plan_values(source, moved.values, options, gaps, plan, report);
  destination.aliases = std::move(moved.aliases);
  const formats::FormatTraits traits = formats::traits_of(options.format);
  if (traits.holds_flat_units) {
    destination.units = units_at_destination(units, options, selection);
  }
  if (traits.holds_annotations) {
    destination.annotations = source.annotations;
    destination.annotations.erase(std::string(formats::kKeyOrderAnnotation));
  }
  plan.on_overflow = options.on_overflow;

  sort_by_name(plan);
  if (traits.holds_replicas) {
    place_own_entries(plan);
    note_separate_own_entries(destination, report);
    note_ranks_without_own_entries(source, destination, report);
    refuse_numbers_as_ranks(destination, report);
    note_flat_state(source, plan, report);
  }
  check_names_are_unique(destination, options, report);
  const bool has_new_names =
      !options.renames.empty() || options.optimizer_names != OptimizerNames::as_stored;
  if (has_new_names && plan.problems.empty()) check_names_form_a_tree(source, destination, report);
  remove_aliases_of_nothing(destination);
  remove_incomplete_units(destination);
  note_separated_parts(source, plan, report);
  check_table_plan(source, options, moved.tensors, report);
  note_lost_units(source, plan, options.format, report);
  note_names_of_model(plan, options, report);
  note_texts_with_names(source, plan, report);
  if (traits.has_own_aliases) note_hidden_names(destination, report);
  note_gaps_in_lists(destination, report);
  if (!options.renames.empty() && plan.problems.empty()) {
    note_keys_beside_values(source, plan, report);
  }
  plan.changes = count_format_changes(plan, source, selection, moved.text_keys, options);
  return plan;
}

}  // namespace tessera::reshard
