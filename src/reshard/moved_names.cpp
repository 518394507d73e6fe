#include "reshard/moved_names.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <set>
#include <utility>

#include "base/size_text.h"
#include "base/unused_patterns.h"
#include "reshard/key_path_rename.h"
#include "reshard/plan_report.h"
#include "reshard/state_key.h"
#include "reshard/torchrec_names.h"
#include "tessera/formats/format_driver.h"

namespace tessera::reshard {
namespace {

using formats::Alias;
using formats::CheckpointContents;
using formats::KeyPath;
using formats::TensorEntry;

/// Returns the key path of an entry after the renames; of `per_rank.<rank>.<name>`, they apply to
/// `<name>`.
RenamedPath path_after_renames(const std::string& source_name, const KeyPath& key_path,
                               const std::vector<Rename>& renames) {
  constexpr std::size_t kNumOwnKeys = 2;  // `per_rank` and the rank
  const auto own = formats::own_entry_to_rename(source_name, renames);
  if (!own || renames.empty()) return renamed_path(key_path, source_name, renames);
  if (key_path.size() <= kNumOwnKeys) {
    return {KeyPath{formats::name_after_renames(source_name, renames)}, 0, key_path.empty(), {}};
  }
  const auto rest = key_path.begin() + kNumOwnKeys;
  RenamedPath path = renamed_path(KeyPath(rest, key_path.end()), own->name,
                                  formats::renames_of_own_entry(own->name, renames));
  const auto put_in_front = [&](KeyPath& keys) {
    keys.insert(keys.begin(), key_path.begin(), rest);
  };
  put_in_front(path.path);
  if (path.made) *path.made += kNumOwnKeys;
  for (KeyPath& keys : path.text_keys) put_in_front(keys);
  return path;
}

CheckpointContents renamed_contents(const CheckpointContents& source,
                                    const std::vector<Rename>& renames) {
  const auto new_name = [&](const std::string& name) {
    return formats::name_after_renames(name, renames);
  };
  CheckpointContents contents = source;
  for (TensorEntry& tensor : contents.tensors) {
    tensor.key_path = path_after_renames(tensor.meta.fqn, tensor.key_path, renames).path;
    tensor.meta.fqn = new_name(tensor.meta.fqn);
    if (!tensor.parameter.empty()) tensor.parameter = new_name(tensor.parameter);
  }
  for (Alias& alias : contents.aliases) {
    alias.fqn = new_name(alias.fqn);
    alias.target = new_name(alias.target);
  }
  return contents;
}

/// New names of tensors of the source, by index of the tensor.
struct StateNames {
  std::map<std::size_t, StateName> by_tensor;
  std::vector<std::size_t> without_rule{};  // as in TorchrecNames
};

/// Returns the new names of optimizer state that PlanOptions::optimizer_names asks for.
StateNames choose_state_names(const CheckpointContents& source, const PlanOptions& options) {
  if (options.optimizer_names == OptimizerNames::as_stored) return {};
  // torchrec's names contain the name of the table, so they must be made from its new name.
  const CheckpointContents contents =
      options.renames.empty() ? source : renamed_contents(source, options.renames);
  TorchrecNames names =
      options.optimizer_names == OptimizerNames::canonical
          ? TorchrecNames{canonical_names(contents), {}}
          : torchrec_names(contents, options.table_plan ? &*options.table_plan : nullptr);
  StateNames state_names{{}, std::move(names.without_rule)};
  for (StateName& name : names.names) {
    state_names.by_tensor.emplace(name.tensor_index, std::move(name));
  }
  return state_names;
}

/// Builds the result of list_moved_names. Keeps references to its arguments.
class NameLister {
 public:
  NameLister(const CheckpointContents& source, const PlanOptions& options,
             const MovedSelection& selection)
      : source_(source),
        options_(options),
        selection_(selection),
        state_names_(choose_state_names(source, options)) {}

  MovedNames list();

 private:
  void list_tensors();
  void list_aliases();
  void list_own_copies(const Alias& alias);
  void list_values();
  /// Adds a tensor under one of its names in the source. Returns its index in
  /// `MovedNames::tensors`.
  std::size_t add_tensor(std::size_t source_tensor, const std::string& source_name,
                         const formats::SharedKeyPath& key_path, std::uint32_t dict_order);
  void set_key_paths();
  std::string new_name_of(const std::string& source_name) const {
    return formats::name_after_renames(source_name, options_.renames);
  }
  RenamedPath renamed_path_of(const std::string& source_name, const KeyPath& key_path) const {
    return path_after_renames(source_name, key_path, options_.renames);
  }

  const CheckpointContents& source_;
  const PlanOptions& options_;
  const MovedSelection& selection_;
  const StateNames state_names_;
  MovedNames names_;
  // Indices in `names_.tensors`, by a tensor's own name at the source. Empty without aliases.
  std::map<std::string, std::size_t> place_of_target_;
  // Tensors `per_rank.<rank>.<name>` of the source, by `<name>`: ranks and indices. Filled when the
  // first alias becomes a tensor.
  std::optional<std::map<std::string, std::vector<std::pair<int, std::size_t>>>> own_copies_;
  // Parallel to the lists `tensors`, `aliases` and `values` of `names_`.
  std::vector<RenamedPath> tensor_paths_;  // empty without renames
  std::vector<RenamedPath> alias_paths_;
  std::vector<RenamedPath> value_paths_;
};

MovedNames NameLister::list() {
  list_tensors();
  list_aliases();
  list_values();
  set_key_paths();
  names_.without_table_rule = state_names_.without_rule;
  return std::move(names_);
}

void NameLister::list_tensors() {
  names_.tensors.reserve(source_.tensors.size());
  for (std::size_t i = 0; i < source_.tensors.size(); ++i) {
    const TensorEntry& tensor = source_.tensors[i];
    if (!selection_.contains(tensor.meta.fqn)) continue;
    const std::size_t place = add_tensor(i, tensor.meta.fqn, tensor.key_path, tensor.dict_order);
    if (!source_.aliases.empty()) place_of_target_[tensor.meta.fqn] = place;
  }
}

void NameLister::list_aliases() {
  const bool holds_aliases = formats::traits_of(options_.format).holds_aliases;
  for (const Alias& alias : source_.aliases) {
    if (!selection_.contains(alias.fqn)) continue;
    const auto target = place_of_target_.find(alias.target);
    if (target != place_of_target_.end() && holds_aliases) {
      names_.aliases.push_back(
          {new_name_of(alias.fqn), names_.tensors[target->second].name, {}, alias.dict_order});
      alias_paths_.push_back(renamed_path_of(alias.fqn, alias.key_path));
      continue;
    }
    const TensorEntry* tensor = source_.find_tensor(alias.target);
    TESSERA_CHECK(tensor != nullptr);  // the reader has checked that each alias has its tensor
    const auto index = static_cast<std::size_t>(tensor - source_.tensors.data());
    place_of_target_.emplace(alias.target,
                             add_tensor(index, alias.fqn, alias.key_path, alias.dict_order));
    list_own_copies(alias);
  }
}

/// Adds a tensor for each rank that has a tensor of its own in place of the alias's target. Without
/// aliases, that rank would otherwise get the elements of another rank under the alias's name.
void NameLister::list_own_copies(const Alias& alias) {
  if (!own_copies_) {
    own_copies_.emplace();
    for (std::size_t i = 0; i < source_.tensors.size(); ++i) {
      const auto own = formats::parse_per_rank_name(source_.tensors[i].meta.fqn);
      if (own) (*own_copies_)[own->name].emplace_back(own->rank, i);
    }
  }
  const auto copies = own_copies_->find(alias.target);
  if (copies == own_copies_->end()) return;
  for (const auto& [rank, tensor] : copies->second) {
    const KeyPath path = formats::per_rank_path(rank, alias.fqn, alias.key_path);
    const std::string& name = names_.own_names.emplace_back(formats::spell(path));
    if (!selection_.contains(name) || source_.find_tensor(name) != nullptr) continue;
    add_tensor(tensor, name, path, alias.dict_order);
  }
}

void NameLister::list_values() {
  for (std::size_t i = 0; i < source_.values.size(); ++i) {
    const formats::ValueEntry& value = source_.values[i];
    if (!selection_.contains(value.name)) continue;
    names_.values.push_back({i, {new_name_of(value.name), {}, value.dict_order}});
    value_paths_.push_back(renamed_path_of(value.name, value.key_path));
  }
}

std::size_t NameLister::add_tensor(std::size_t source_tensor, const std::string& source_name,
                                   const formats::SharedKeyPath& key_path,
                                   std::uint32_t dict_order) {
  MovedTensor moved{.source_tensor = source_tensor,
                    .source_name = &source_name,
                    .name = new_name_of(source_name),
                    .dict_order = dict_order};
  const auto state_name = state_names_.by_tensor.find(source_tensor);
  const bool is_alias = source_name != source_.tensors[source_tensor].meta.fqn;
  const bool has_state_name = state_name != state_names_.by_tensor.end() && !is_alias;
  if (has_state_name) moved.name = state_name->second.fqn;
  if (!options_.renames.empty()) {
    tensor_paths_.push_back(has_state_name ? RenamedPath{state_name->second.key_path}
                                           : renamed_path_of(source_name, key_path));
  } else if (has_state_name) {
    moved.key_path = state_name->second.key_path;
  } else if (formats::parse_per_rank_name(source_name)) {
    moved.key_path = renamed_path_of(source_name, key_path).path;
  } else {
    moved.key_path = key_path;  // shares the memory of the source's path
  }
  moved.has_torchrec_name = has_torchrec_name(moved.name);
  names_.tensors.push_back(std::move(moved));
  return names_.tensors.size() - 1;
}

void NameLister::set_key_paths() {
  std::vector<RenamedPath*> all;
  for (auto* const paths : {&tensor_paths_, &alias_paths_, &value_paths_}) {
    for (RenamedPath& path : *paths) all.push_back(&path);
  }
  if (!options_.renames.empty()) enter_dicts(all);
  for (const RenamedPath* const path : all) {
    names_.text_keys.insert(path->text_keys.begin(), path->text_keys.end());
  }
  for (std::size_t i = 0; i < tensor_paths_.size(); ++i) {
    names_.tensors[i].key_path = std::move(tensor_paths_[i].path);
  }
  for (std::size_t i = 0; i < alias_paths_.size(); ++i) {
    names_.aliases[i].key_path = std::move(alias_paths_[i].path);
  }
  for (std::size_t i = 0; i < value_paths_.size(); ++i) {
    names_.values[i].entry.key_path = std::move(value_paths_[i].path);
  }
}

std::vector<std::string_view> names_of(const CheckpointContents& source) {
  std::vector<std::string_view> names;
  for (const TensorEntry& tensor : source.tensors) names.push_back(tensor.meta.fqn);
  for (const Alias& alias : source.aliases) names.push_back(alias.fqn);
  for (const formats::ValueEntry& value : source.values) names.push_back(value.name);
  return names;
}

}  // namespace

MovedSelection::MovedSelection(const CheckpointContents& source, const PlanOptions& options)
    : only_(options.only),
      keeps_ranks_(!formats::holds_whole_tensors(options.format) ||
                   formats::traits_of(options.format).has_ranks_when_read) {
  if (options.optimizer == OptimizerSelection::leave_out) left_out_.emplace(source);
  std::vector<std::string> wanted = tessera::detail::unused_patterns(options.only, {}).wanted;
  has_wanted_ = !wanted.empty();
  std::erase_if(wanted,
                [](const std::string& pattern) { return !formats::spells_per_rank(pattern); });
  if (!wanted.empty()) wanted_of_ranks_.emplace(std::move(wanted));
}

bool MovedSelection::contains(std::string_view name) const {
  return !(left_out_ && left_out_->contain(name)) && is_asked_for(name);
}

bool MovedSelection::is_asked_for(std::string_view name) const {
  const bool is_alone = !keeps_ranks_ && has_wanted_ && formats::parse_per_rank_name(name);
  if (is_alone && !(wanted_of_ranks_ && wanted_of_ranks_->selects(name))) return false;
  return only_.selects(name);
}

bool MovedSelection::keeps_state(std::string_view name) const {
  return left_out_ && contains(name) && left_out_->states().behind_state(name).has_value();
}

bool MovedSelection::keeps_in_optimizer(std::string_view name) const {
  return left_out_ && contains(name) && left_out_->may_contain(name) && !keeps_state(name);
}

bool MovedSelection::leaves_out_of_rank(std::string_view name) const {
  return only_.selects(name) && !is_asked_for(name) && !(left_out_ && left_out_->contain(name));
}

MovedNames list_moved_names(const CheckpointContents& source, const PlanOptions& options,
                            const MovedSelection& selection) {
  return NameLister(source, options, selection).list();
}

LeftOut count_left_out(const CheckpointContents& source, const MovedNames& moved,
                       const MovedSelection& selection) {
  std::vector<bool> is_moved(source.tensors.size());
  for (const MovedTensor& tensor : moved.tensors) is_moved[tensor.source_tensor] = true;
  const auto is_left = [&](const std::string& name) { return !selection.contains(name); };
  const auto count_left = [&](const auto& entries, auto name_of) {
    return static_cast<std::size_t>(std::ranges::count_if(entries, is_left, name_of));
  };
  LeftOut left;
  left.tensors = static_cast<std::size_t>(std::ranges::count(is_moved, false));
  left.values = count_left(source.values, &formats::ValueEntry::name);
  // If only an alias of a tensor is moved, the tensor's own name counts as an alias that is left
  // out.
  const auto name_of_tensor = [](const TensorEntry& tensor) -> const std::string& {
    return tensor.meta.fqn;
  };
  left.aliases = count_left(source.tensors, name_of_tensor) +
                 count_left(source.aliases, &Alias::fqn) - left.tensors;
  return left;
}

void check_patterns_match(const CheckpointContents& source, const PlanOptions& options,
                          const MovedSelection& selection, PlanReport& report) {
  const std::vector<std::string_view> names = names_of(source);
  const auto unused = formats::unused_patterns(options.only, names);
  if (!unused.wanted.empty()) {
    refuse_options("names to move", "a pattern that matches a name",
                   "'" + printable(unused.wanted.front()) + "'");
  }
  if (!selection.selects_of_ranks()) {
    std::vector<std::string_view> here = names;
    std::erase_if(here, [&](std::string_view name) {
      return formats::parse_per_rank_name(name) && !selection.is_asked_for(name);
    });
    const auto unused_here = tessera::detail::unused_patterns(options.only, here).wanted;
    if (!unused_here.empty()) {
      refuse_options("names to move", "a pattern that matches a name that all ranks share",
                     "'" + printable(unused_here.front()) +
                         "', which matches only entries of single ranks; 'per_rank' moves them "
                         "into one file");
    }
  }
  for (const std::string& pattern : unused.exclusions) {
    report.note_unused_exclusion("names to move", pattern);
  }
  const auto is_asked_for = [&](std::string_view name) { return selection.is_asked_for(name); };
  if (!options.only.selects_everything() && std::ranges::none_of(names, is_asked_for)) {
    refuse_options("names to move", "patterns that select at least one name",
                   "patterns that select none");
  }
  for (const Rename& rename : options.renames) {
    const auto fits = [&](std::string_view name) {
      return selection.contains(name) && formats::fits_entry(rename, std::string(name));
    };
    if (std::ranges::none_of(names, fits)) {
      refuse_options("rename", "a rule that fits a name that is moved",
                     "'" + printable(rename.from) + "'");
    }
    std::size_t num_kept = 0;
    std::string first_kept;
    for (const std::string_view name : names) {
      const auto own = formats::parse_per_rank_name(name);
      if (!own || !rename.from.starts_with(own->name + ".") || !selection.contains(name)) continue;
      if (formats::rename_of_dict(own->name, rename)) continue;
      if (num_kept++ == 0) first_kept = name;
    }
    if (num_kept == 0) continue;
    report.note("rename", first_kept,
                "a dict, as on other ranks, so that '" + printable(rename.from) + "' fits",
                num_kept == 1 ? "one entry, which keeps its name"
                              : "one entry, which keeps its name, as " +
                                    std::to_string(num_kept - 1) + " of other names do");
  }
}

void note_kept_state(const MovedNames& moved, const MovedSelection& selection, PlanReport& report) {
  const auto note = [&](const auto& is_kept_name, std::string_view expected,
                        std::string_view found) {
    const auto is_kept = [&](const MovedTensor& tensor) {
      return is_kept_name(*tensor.source_name);
    };
    const auto first = std::ranges::find_if(moved.tensors, is_kept);
    if (first == moved.tensors.end()) return;
    const auto num_kept = static_cast<std::size_t>(std::ranges::count_if(moved.tensors, is_kept));
    report.note("optimizer left out", *first->source_name, std::string(expected),
                std::string(found) + ", so " + counted(num_kept, "tensor") +
                    " that may be optimizer state " + (num_kept == 1 ? "is" : "are") +
                    " moved (leave out by name what is not of a model)");
  };
  note([&](const std::string& name) { return selection.keeps_state(name); },
       "its parameter in the checkpoint, or param_groups beside its state", "neither");
  note([&](const std::string& name) { return selection.keeps_in_optimizer(name); },
       "'state', 'param_groups' or 'grad_scaler' in the dict of an optimizer", "another entry");
}

void note_state_without_table_rule(const CheckpointContents& source, const MovedNames& moved,
                                   const MovedSelection& selection, PlanReport& report) {
  const auto name_of = [&](std::size_t tensor) -> const std::string& {
    return source.tensors[tensor].meta.fqn;
  };
  const auto is_moved = [&](std::size_t tensor) { return selection.contains(name_of(tensor)); };
  const auto first = std::ranges::find_if(moved.without_table_rule, is_moved);
  if (first == moved.without_table_rule.end()) return;
  const auto num_kept =
      static_cast<std::size_t>(std::ranges::count_if(moved.without_table_rule, is_moved));
  report.note("names of optimizer state", name_of(*first), "a rule for its table in the plan",
              "none, so " + counted(num_kept, "tensor") + " of such tables " +
                  (num_kept == 1 ? "keeps its name" : "keep their names"));
}

namespace {

/// Returns the name that state of the parameter `name` would have if the parameter were called
/// `other`. The state may lack first components of the parameter's name (`model.`), which both
/// names then must have. Returns nothing if the state has another name of the parameter.
std::optional<std::string> state_under(const std::string& state, std::string_view name,
                                       std::string_view other) {
  while (!name.empty()) {
    const std::size_t at = (state + ".").find("." + std::string(name) + ".");
    if (at != std::string::npos) {
      std::string result = state;
      return result.replace(at + 1, name.size(), other);
    }
    const std::size_t dot = name.find('.');
    if (dot == std::string_view::npos || !other.starts_with(name.substr(0, dot + 1))) break;
    name.remove_prefix(dot + 1);
    other.remove_prefix(dot + 1);
  }
  return std::nullopt;
}

}  // namespace

void note_state_under_other_names(const CheckpointContents& source, const PlanOptions& options,
                                  const MovedSelection& selection, PlanReport& report) {
  if (options.only.selects_everything() || source.aliases.empty()) return;
  std::map<std::string_view, std::vector<std::string>> names_of_tied;  // by the tensor's own name
  for (const Alias& alias : source.aliases) {
    auto& names = names_of_tied[alias.target];
    if (names.empty()) names.push_back(alias.target);
    names.push_back(alias.fqn);
  }
  const std::vector<StateRole> roles = classify_state(source);
  std::set<std::string> told;
  for (std::size_t t = 0; t < roles.size(); ++t) {
    const std::string& state = source.tensors[t].meta.fqn;
    if (!roles[t].parameter_index || selection.contains(state)) continue;
    const auto tied = names_of_tied.find(source.tensors[*roles[t].parameter_index].meta.fqn);
    if (tied == names_of_tied.end()) continue;
    for (const std::string& name : tied->second) {
      if (!selection.contains(name)) continue;
      for (const std::string& stored : tied->second) {
        const auto expected = state_under(state, stored, name);
        if (selection.contains(stored) || !expected || !selection.contains(*expected)) continue;
        if (!told.insert(name).second) continue;
        report.note(
            "names to move", name, "patterns that also select its optimizer state",
            "state under its other name, such as " + printable(state) + ", which is left out");
      }
    }
  }
}

void note_groups_with_old_names(const CheckpointContents& source, const MovedNames& moved,
                                const PlanOptions& options, PlanReport& report) {
  if (options.renames.empty()) return;
  const StateRoots states(source);
  std::set<std::string> roots;  // parts of names before `state`, where what follows it changes
  const auto add_root = [&](const std::string& name) {
    const auto before = states.behind_state(name);
    const std::string new_name = formats::name_after_renames(name, options.renames);
    if (!before || !behind_state(new_name)) return;
    const bool is_same = new_name.ends_with("state." + std::string(*before));
    if (!is_same) roots.emplace(*states.root_of(name));
  };
  for (const MovedTensor& tensor : moved.tensors) add_root(*tensor.source_name);
  for (const MovedValue& value : moved.values) add_root(source.values[value.source_value].name);
  for (const MovedValue& value : moved.values) {
    const std::string& name = source.values[value.source_value].name;
    const auto root = before_component(name, "param_groups");
    const bool lists = name.ends_with("param_groups") || name.ends_with(".params");
    if (!root || !lists || roots.erase(std::string(*root)) == 0) continue;
    report.note("rename", name, "names of parameters as their state has them",
                "the old names, if it lists parameters by name (a recipe renames both)");
  }
}

namespace {

/// What PyTorch, which goes by names, takes for the parameter of each moved tensor: an index in the
/// source, parallel to `MovedNames::tensors`; nothing for a tensor that is no state of a parameter.
using Parameters = std::vector<std::optional<std::size_t>>;

/// `name_of`: the old or the new name of a MovedTensor. `others`: the aliases and values that are
/// moved, under names of the same kind.
template <class NameOf>
Parameters parameters_by_name(const CheckpointContents& source,
                              const std::vector<MovedTensor>& moved, const NameOf& name_of,
                              CheckpointContents others) {
  std::vector<std::size_t> order(moved.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  const auto name_at = [&](std::size_t i) -> const std::string& { return name_of(moved[i]); };
  std::ranges::sort(order, {}, name_at);
  CheckpointContents& contents = others;
  for (const std::size_t i : order) {
    const TensorMeta& meta = source.tensors[moved[i].source_tensor].meta;
    // No recorded kind and parameter: PyTorch does not know them.
    contents.tensors.emplace_back().meta = {name_at(i), meta.dtype, meta.shape};
  }
  const std::vector<StateRole> roles = classify_state(contents);
  Parameters parameters(moved.size());
  for (std::size_t i = 0; i < roles.size(); ++i) {
    const auto parameter = roles[i].parameter_index;
    if (parameter) parameters[order[i]] = moved[order[*parameter]].source_tensor;
  }
  return parameters;
}

Parameters parameters_by_old_name(const CheckpointContents& source, const MovedNames& moved,
                                  const MovedSelection& selection) {
  CheckpointContents others;
  std::set<std::string_view> tensors;
  for (const MovedTensor& tensor : moved.tensors) tensors.insert(*tensor.source_name);
  for (const Alias& alias : source.aliases) {
    const bool is_alias = tensors.contains(alias.target) && !tensors.contains(alias.fqn);
    if (is_alias && selection.contains(alias.fqn)) others.aliases.push_back(alias);
  }
  for (const MovedValue& value : moved.values) {
    others.values.push_back(source.values[value.source_value]);
  }
  return parameters_by_name(
      source, moved.tensors,
      [](const MovedTensor& tensor) -> const std::string& { return *tensor.source_name; },
      std::move(others));
}

/// Returns the first components of a parameter's name that the name of its state lacks: `model.`
/// for `optim.state.a.w.exp_avg` of `model.a.w`, but not those that both names begin with. Returns
/// nothing if the state has another name of the parameter.
std::optional<std::string> missing_in_state(std::string_view state, std::string_view parameter) {
  const std::string within = std::string(state) + ".";
  std::string_view found = parameter;
  while (within.find("." + std::string(found) + ".") == std::string::npos) {
    const std::size_t dot = found.find('.');
    if (dot == std::string_view::npos) return std::nullopt;
    found.remove_prefix(dot + 1);
  }
  std::string_view missing = parameter.substr(0, parameter.size() - found.size());
  for (std::size_t dot = missing.find('.'); dot != std::string_view::npos;
       dot = missing.find('.')) {
    const std::string_view component = missing.substr(0, dot + 1);
    if (!state.starts_with(component)) break;
    state.remove_prefix(component.size());
    missing.remove_prefix(component.size());
  }
  return std::string(missing);
}

/// Returns which moved tensors are state whose parameter gets more components before the name that
/// the state has (`model.a.w` becomes `model.net.a.w`). If all parameters get one component, they
/// only get into a dict. `parameters`: before the renames.
std::vector<bool> states_with_shorter_names(const MovedNames& moved, const Parameters& parameters) {
  std::map<std::size_t, const MovedTensor*> by_source;
  for (const MovedTensor& tensor : moved.tensors) by_source.emplace(tensor.source_tensor, &tensor);
  std::vector<std::pair<std::optional<std::string>, std::optional<std::string>>> missing(
      moved.tensors.size());
  std::map<std::string, std::set<std::string>> new_by_old;
  for (std::size_t i = 0; i < moved.tensors.size(); ++i) {
    if (!parameters[i]) continue;
    const MovedTensor& parameter = *by_source.at(*parameters[i]);
    auto& [before, after] = missing[i];
    before = missing_in_state(*moved.tensors[i].source_name, *parameter.source_name);
    after = missing_in_state(moved.tensors[i].name, parameter.name);
    if (before && after) new_by_old[*before].insert(*after);
  }
  std::vector<bool> result(moved.tensors.size());
  for (std::size_t i = 0; i < missing.size(); ++i) {
    const auto& [before, after] = missing[i];
    result[i] = before && after && before != after &&
                (std::ranges::count(*after, '.') > 1 || new_by_old.at(*before).size() > 1);
  }
  return result;
}

Parameters parameters_by_new_name(const CheckpointContents& source, const MovedNames& moved) {
  CheckpointContents others;
  others.aliases = moved.aliases;
  for (const MovedValue& value : moved.values) others.values.push_back(value.entry);
  return parameters_by_name(
      source, moved.tensors,
      [](const MovedTensor& tensor) -> const std::string& { return tensor.name; },
      std::move(others));
}

}  // namespace

void note_state_of_renamed_parameters(const CheckpointContents& source, const MovedNames& moved,
                                      const MovedSelection& selection, const PlanOptions& options,
                                      PlanReport& report) {
  if (options.renames.empty()) return;
  const Parameters before = parameters_by_old_name(source, moved, selection);
  const Parameters after = parameters_by_new_name(source, moved);
  std::vector<bool> is_renamed(source.tensors.size());
  for (const MovedTensor& tensor : moved.tensors) {
    if (tensor.name != *tensor.source_name) is_renamed[tensor.source_tensor] = true;
  }
  const std::vector<bool> is_shorter = states_with_shorter_names(moved, before);
  std::size_t num_apart = 0;
  std::size_t first = 0;
  for (std::size_t i = 0; i < before.size(); ++i) {
    const bool is_apart =
        before[i] && is_renamed[*before[i]] && (after[i] != before[i] || is_shorter[i]);
    if (is_apart && num_apart++ == 0) first = i;
  }
  if (num_apart == 0) return;
  const auto new_name_of = [&](std::size_t source_tensor) {
    const auto tensor =
        std::ranges::find(moved.tensors, source_tensor, &MovedTensor::source_tensor);
    return "'" + printable(tensor->name) + "'";
  };
  report.note("rename", *moved.tensors[first].source_name,
              "a new name that fits that of its parameter, " + new_name_of(*before[first]),
              "'" + printable(moved.tensors[first].name) + "', so that PyTorch gives it to " +
                  (after[first] && after[first] != before[first] ? new_name_of(*after[first])
                                                                 : "no parameter") +
                  (num_apart == 1
                       ? std::string()
                       : ", and " + counted(num_apart - 1, "more tensor") + " of state like it") +
                  " (rename the state too)");
}

void note_numbers_in_text(const CheckpointContents& source, const MovedNames& moved,
                          formats::Format format, PlanReport& report) {
  // Files of Python objects for torch.load: other formats with all types of keys have annotations.
  const formats::FormatTraits traits = formats::driver_of(format).traits();
  if (!traits.holds_key_types || traits.holds_annotations) return;
  const StateRoots states(source);
  for (const MovedTensor& tensor : moved.tensors) {
    const auto behind = states.behind_state(*tensor.source_name);
    const auto& path = source.tensors[tensor.source_tensor].key_path;
    if (!behind || path.size() < 2) continue;
    const std::string number(behind->substr(0, behind->find('.')));
    const bool is_text =
        has_only_digits(number) && std::ranges::find(path, formats::Key(number)) != path.end();
    if (!is_text) continue;
    return report.note("optimizer keys", *tensor.source_name,
                       "numbers of parameters as keys of optimizer state",
                       "state under text such as '" + number +
                           "', where torch.optim finds no state; a move of the result with names "
                           "can make numbers of them",
                       {Remedy::Action::name_params});
  }
}

void note_numbers_of_renamed_parameters(const CheckpointContents& source, const MovedNames& moved,
                                        const PlanOptions& options, PlanReport& report) {
  if (options.renames.empty()) return;
  const StateRoots states(source);
  const auto is_numbered = [&](const MovedTensor& tensor) {
    const auto behind = states.behind_state(*tensor.source_name);
    return behind && has_only_digits(behind->substr(0, behind->find('.')));
  };
  const auto numbered = std::ranges::find_if(moved.tensors, is_numbered);
  if (numbered == moved.tensors.end()) return;
  std::size_t num_taken = 0;
  const MovedTensor* first = nullptr;
  for (const MovedTensor& tensor : moved.tensors) {
    const bool takes_other_name = tensor.name != *tensor.source_name &&
                                  source.find_tensor(tensor.name) != nullptr &&
                                  !states.behind_state(*tensor.source_name);
    if (takes_other_name && num_taken++ == 0) first = &tensor;
  }
  if (num_taken == 0) return;
  report.note("rename", *first->source_name,
              "a name that no other tensor of the source has, because optimizer state is under "
              "numbers (" +
                  printable(*numbered->source_name) + ")",
              "'" + printable(first->name) + "'" +
                  (num_taken == 1 ? std::string()
                                  : ", and " + counted(num_taken - 1, "more tensor") + " like it") +
                  "; a number stands for a place among the parameters, so the state goes to the "
                  "parameter that has this name now",
              {Remedy::Action::name_params});
}

void note_renames_within_numbers(const CheckpointContents& source, const MovedNames& moved,
                                 const PlanOptions& options, PlanReport& report) {
  if (options.renames.empty()) return;
  struct Within {
    std::size_t count = 0;
    std::string first;
  };
  std::vector<Within> within(options.renames.size());
  const auto add = [&](std::string_view name) {
    if (formats::name_without_rank(name) != name) return;  // the shared name counts
    const auto rename = std::ranges::find_if(
        options.renames, [&](const Rename& each) { return name.starts_with(each.from); });
    if (rename == options.renames.end()) return;
    const std::string& from = rename->from;
    const auto is_digit = [&](std::size_t at) { return has_only_digits(name.substr(at, 1)); };
    if (from.empty() || name.size() == from.size()) return;
    if (!is_digit(from.size() - 1) || !is_digit(from.size())) return;
    Within& found = within[static_cast<std::size_t>(rename - options.renames.begin())];
    if (found.count++ == 0) found.first = name;
  };
  for (const MovedTensor& tensor : moved.tensors) add(*tensor.source_name);
  for (const MovedValue& value : moved.values) add(source.values[value.source_value].name);
  for (std::size_t i = 0; i < within.size(); ++i) {
    if (within[i].count == 0) continue;
    const Rename& rename = options.renames[i];
    const std::string from = printable(rename.from);
    report.note("rename", within[i].first, "a dot after '" + from + "', or nothing",
                counted(within[i].count, "name") +
                    " in which more digits follow: this one becomes '" +
                    printable(renamed(within[i].first, options.renames)) + "' (" + from +
                    ".=" + printable(rename.to) + ". changes none of them)");
  }
}

}  // namespace tessera::reshard
