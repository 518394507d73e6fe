#include "reshard/numbered_optimizer.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "formats/numbered_state.h"
#include "formats/per_rank.h"
#include "reshard/moved_names.h"
#include "reshard/optimizer_rules.h"
#include "tessera/base/error.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointReader;
using formats::Key;
using formats::KeyPath;
using formats::NonStringKey;
using formats::ValueEntry;

constexpr std::string_view kState = "state";
constexpr std::string_view kGroups = "param_groups";
constexpr std::string_view kParams = "params";
constexpr std::string_view kParamNames = "param_names";
constexpr std::string_view kLowRankSettings[] = {"rank", "update_proj_gap"};  // GaLore, APOLLO
constexpr std::string_view kStateNumbersRule = "numbers of optimizer state";

/// Returns whether a text is a number without leading zeros, as Python writes it.
bool is_number(std::string_view text) {
  constexpr std::size_t kMaxDigits = 18;
  return !text.empty() && text.size() <= kMaxDigits && (text == "0" || text.front() != '0') &&
         std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}

/// The text between two dots of a name, and where it is in the key path. A key may contain dots, so
/// several components may have the same key.
struct Component {
  std::string_view text;
  std::size_t begin;  // position in the name
  std::size_t key;    // index in the path
  std::size_t begin_in_key;
  bool is_position;  // the key is a position in a list
};

void add_components(std::string_view text, std::size_t begin, std::size_t key,
                    std::vector<Component>& components) {
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find('.', at), text.size());
    components.push_back({text.substr(at, end - at), begin + at, key, at, false});
    at = end + 1;
  }
}

/// Splits a name at its dots. Returns nothing if the path does not spell the name.
std::vector<Component> components_of(std::string_view name, const KeyPath& path) {
  std::vector<Component> components;
  if (path.empty()) {
    add_components(name, 0, 0, components);
    return components;
  }
  if (formats::spell(path) != name) return {};
  std::size_t begin = 0;
  for (std::size_t key = 0; key < path.size(); ++key) {
    const std::size_t nbytes = formats::spell({path[key]}).size();
    const std::string_view text = name.substr(begin, nbytes);
    if (std::holds_alternative<std::string>(path[key])) {
      add_components(text, begin, key, components);
    } else {
      const bool is_position = std::holds_alternative<std::int64_t>(path[key]);
      components.push_back({text, begin, key, 0, is_position});
    }
    begin += nbytes + 1;
  }
  return components;
}

/// The values of a checkpoint that hold an optimizer's `param_groups`, as indices of values.
struct GroupValues {
  std::optional<std::size_t> whole;              // `param_groups`, a list of dicts
  std::map<std::uint64_t, std::size_t> params;   // `param_groups.<g>.params`, by group
  std::map<std::uint64_t, std::size_t> names{};  // `param_groups.<g>.param_names`
  std::set<std::uint64_t> low_rank{};            // groups with kLowRankSettings
};

/// Finds the `param_groups` of all optimizers. The key of the map is the part of the names before
/// `param_groups`: `optim.`
std::map<std::string, GroupValues> find_groups(const CheckpointReader& reader) {
  std::map<std::string, GroupValues> found;
  const auto& values = reader.contents().values;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i].name.find(kGroups) == std::string::npos) continue;
    std::vector<Component> parts;
    add_components(values[i].name, 0, 0, parts);
    const std::size_t n = parts.size();
    if (parts[n - 1].text == kGroups) {
      found[values[i].name.substr(0, parts[n - 1].begin)].whole = i;
    } else if (n >= 3 && parts[n - 3].text == kGroups && is_number(parts[n - 2].text)) {
      const std::string root = values[i].name.substr(0, parts[n - 3].begin);
      const std::uint64_t group = std::stoull(std::string(parts[n - 2].text));
      if (parts[n - 1].text == kParams) found[root].params[group] = i;
      if (parts[n - 1].text == kParamNames) found[root].names[group] = i;
      if (std::ranges::find(kLowRankSettings, parts[n - 1].text) != std::end(kLowRankSettings)) {
        found[root].low_rank.insert(group);
      }
    }
  }
  return found;
}

bool has_numbers(const Value& params) {
  const auto* list = params.get_if<Value::List>();
  return list != nullptr &&
         std::ranges::any_of(*list, [](const Value& value) { return value.is<std::int64_t>(); });
}

/// Reads the `param_groups` of one optimizer.
class GroupsReader {
 public:
  GroupsReader(const CheckpointReader& reader, const std::string& root, const GroupValues& groups)
      : reader_(reader), groups_(groups) {
    optimizer_.root = root;
  }

  /// Returns the optimizer; nothing if its groups hold no numbers.
  std::optional<NumberedOptimizer> read() {
    if (groups_.whole) {
      read_whole(*groups_.whole);
    } else {
      for (const auto& [group, index] : groups_.params) {
        const auto names = groups_.names.find(group);
        std::optional<Value> param_names;
        if (names != groups_.names.end()) param_names = reader_.read_value(names->second);
        add_group(index, reader_.read_value(index), param_names ? &*param_names : nullptr);
        if (groups_.low_rank.contains(group)) note_low_rank();
        optimizer_.values.push_back(index);
      }
    }
    if (!any_number_) return std::nullopt;
    if (num_named_ != optimizer_.groups.size()) optimizer_.param_names.clear();
    return std::move(optimizer_);
  }

 private:
  void read_whole(std::size_t index) {
    const Value value = reader_.read_value(index);
    const auto* list = value.get_if<Value::List>();
    if (list == nullptr) return;
    for (const Value& group : *list) {
      const Value* params = group.find(kParams);
      if (params == nullptr) continue;
      add_group(index, *params, group.find(kParamNames));
      const auto is_setting = [&](std::string_view key) { return group.find(key) != nullptr; };
      if (std::ranges::any_of(kLowRankSettings, is_setting)) note_low_rank();
    }
    optimizer_.values.push_back(index);
  }

  void add_group(std::size_t index, const Value& params, const Value* param_names) {
    any_number_ = any_number_ || has_numbers(params);
    std::vector<std::string>& numbers = optimizer_.groups.emplace_back();
    const auto* list = params.get_if<Value::List>();
    if (list == nullptr) refuse(index, params);
    for (const Value& param : list == nullptr ? Value::List() : *list) {
      const auto* number = param.get_if<std::int64_t>();
      if (number == nullptr || *number < 0) {
        refuse(index, param);
      } else {
        numbers.push_back(std::to_string(*number));
      }
    }
    if (any_number_ && refused_) fail(refused_->first, "numbers of parameters", refused_->second);
    add_names(numbers.size(), param_names);
  }

  /// Remembers that the last group is one of a low-rank optimizer.
  void note_low_rank() {
    const std::vector<std::string>& numbers = optimizer_.groups.back();
    optimizer_.unsure.insert(numbers.begin(), numbers.end());
  }

  void add_names(std::size_t num_params, const Value* param_names) {
    std::vector<std::string>& names = optimizer_.param_names.emplace_back();
    const auto* list = param_names == nullptr ? nullptr : param_names->get_if<Value::List>();
    if (list == nullptr || list->size() != num_params) return;
    for (const Value& name : *list) {
      const auto* text = name.get_if<std::string>();
      if (text == nullptr) return;
      names.push_back(*text);
    }
    ++num_named_;
  }

  /// Remembers the first parameter that is no number. It is an error only if the optimizer also has
  /// numbers.
  void refuse(std::size_t index, const Value& param) {
    if (!refused_) refused_ = std::pair(index, value_to_string(param));
  }

  [[noreturn]] void fail(std::size_t index, std::string_view expected,
                         const std::string& found) const {
    const std::string& name = reader_.contents().values[index].name;
    throw Error::expected(ErrorKind::mismatch, {.path = reader_.path(), .fqn = name},
                          kStateNumbersRule, expected, found);
  }

  const CheckpointReader& reader_;
  const GroupValues& groups_;
  NumberedOptimizer optimizer_;
  bool any_number_ = false;
  std::size_t num_named_ = 0;                                   // groups with `param_names`
  std::optional<std::pair<std::size_t, std::string>> refused_;  // first param that is no number
};

/// Calls `visit(name, place)` for each number of a parameter in a name of `contents`.
template <class Visit>
void for_each_number(const formats::CheckpointContents& contents, const Visit& visit) {
  const auto visit_all = [&](const std::string& name, const KeyPath& path) {
    for (const NumberPlace& place : number_places(name, path)) visit(name, place);
  };
  for (const auto& tensor : contents.tensors) visit_all(tensor.meta.fqn, tensor.key_path);
  for (const auto& value : contents.values) visit_all(value.name, value.key_path);
  for (const auto& alias : contents.aliases) visit_all(alias.fqn, alias.key_path);
}

/// Says in words which numbers an optimizer has: `one of the 3 numbers in optim.param_groups, 0 to
/// 2`.
std::string numbers_in_words(const NumberedOptimizer& optimizer) {
  std::string first, last;
  for (const auto& group : optimizer.groups) {
    if (group.empty()) continue;
    if (first.empty()) first = group.front();
    last = group.back();
  }
  return "one of the " + std::to_string(optimizer.num_params()) + " numbers in " +
         printable(optimizer.root) + std::string(kGroups) + ", " + first + " to " + last;
}

/// Checks that no number is in two groups, and that each number in the names of state is in a
/// group. Sets the optimizer's `shapes`, `flat` and `unsure`.
void check_numbers(const CheckpointReader& reader, NumberedOptimizer& optimizer) {
  std::map<std::string, std::size_t> group_of;
  for (std::size_t g = 0; g < optimizer.groups.size(); ++g) {
    for (const std::string& number : optimizer.groups[g]) {
      const auto [known, is_new] = group_of.emplace(number, g);
      if (is_new) continue;
      throw Error::expected(ErrorKind::mismatch,
                            {.path = reader.path(), .fqn = optimizer.root + std::string(kGroups)},
                            kStateNumbersRule, "each number once",
                            number + " in group " + std::to_string(known->second) +
                                " and in group " + std::to_string(g));
    }
  }
  for_each_number(reader.contents(), [&](const std::string& name, const NumberPlace& place) {
    if (!place.is_of(name, optimizer.root)) return;
    if (group_of.contains(std::string(place.number(name)))) return;
    throw Error::expected(ErrorKind::mismatch, {.path = reader.path(), .fqn = name},
                          kStateNumbersRule, numbers_in_words(optimizer),
                          std::string(place.number(name)));
  });
  std::map<std::string_view, Shape> shape_of;  // key: a name up to the number, of each rank
  for (const auto& tensor : reader.contents().tensors) {
    const std::string& name = tensor.meta.fqn;
    for (const NumberPlace& place : number_places(name, tensor.key_path)) {
      if (!place.is_of(name, optimizer.root) || !is_pointwise_name(place.entry(name))) continue;
      const std::string_view front = std::string_view(name).substr(0, place.end);
      const auto [known, is_new] = shape_of.emplace(front, tensor.meta.shape);
      if (known->second != tensor.meta.shape) optimizer.unsure.emplace(place.number(name));
      // The shared state decides. A rank may have state that no other rank has.
      if (place.root(name) == optimizer.root) {
        optimizer.shapes.insert_or_assign(std::string(place.number(name)), tensor.meta.shape);
      } else {
        optimizer.shapes.emplace(place.number(name), tensor.meta.shape);
      }
      if (is_flat_state(tensor)) optimizer.flat.emplace(place.number(name));
    }
  }
}

[[noreturn]] void refuse_none(const CheckpointReader& reader) {
  std::string numbered;
  for_each_number(reader.contents(), [&](const std::string& name, const NumberPlace&) {
    if (numbered.empty()) numbered = name;
  });
  if (numbered.empty()) {
    throw Error::expected(ErrorKind::mismatch, {.path = reader.path()}, kStateNumbersRule,
                          "an optimizer whose param_groups hold numbers", "none",
                          "does its state have names already?");
  }
  throw Error::expected(
      ErrorKind::mismatch, {.path = reader.path(), .fqn = numbered}, kStateNumbersRule,
      "param_groups beside the state, to know the order of the numbers", "none with numbers");
}

/// Returns the first value such as `optim.param_groups.up.weight.lr`: a field that is stored for
/// each parameter instead of for each group; null if the checkpoint has no such value.
const ValueEntry* find_field_of_parameter(const CheckpointReader& reader) {
  const auto is_field = [](const ValueEntry& value) {
    if (value.name.find(kGroups) == std::string::npos) return false;
    std::vector<Component> parts;
    add_components(value.name, 0, 0, parts);
    const auto groups = std::ranges::find(parts, kGroups, &Component::text);
    return parts.end() - groups > 2 && !is_number(groups[1].text);
  };
  const auto& values = reader.contents().values;
  const auto found = std::ranges::find_if(values, is_field);
  return found == values.end() ? nullptr : &*found;
}

/// Throws the error that no optimizer has names in its `param_groups`.
[[noreturn]] void refuse_no_names(const CheckpointReader& reader) {
  constexpr std::string_view kRuleOfNumbers = "numbers for parameters";
  if (const ValueEntry* const field = find_field_of_parameter(reader)) {
    throw Error::expected(
        ErrorKind::unsupported, {.path = reader.path(), .fqn = field->name}, kRuleOfNumbers,
        "groups that list the names of their parameters (params)",
        "fields for each parameter, as flatten_optimizer_state_dict of PyTorch gives them "
        "(as torchtitan saves), which do not say the order of the parameters",
        "move the state under its names; set_optimizer_state_dict of PyTorch loads it with "
        "StateDictOptions(flatten_optimizer_state_dict=True), also into a plain optimizer");
  }
  throw Error::expected(ErrorKind::mismatch, {.path = reader.path()}, kRuleOfNumbers,
                        "an optimizer whose param_groups list names of parameters (params)", "none",
                        "does its state have numbers already?");
}

/// Removes each optimizer that has no entry of `param_groups` that `only` selects. If `only`
/// selects no `param_groups` at all, keeps all optimizers.
template <class Optimizer>
void select(const CheckpointReader& reader, const NameSelection& only,
            std::vector<Optimizer>& optimizers) {
  std::vector<Optimizer> selected;
  for (const Optimizer& optimizer : optimizers) {
    if (std::ranges::any_of(optimizer.values, [&](std::size_t value) {
          return only.selects(reader.contents().values[value].name);
        })) {
      selected.push_back(optimizer);
    }
  }
  if (!selected.empty()) optimizers = std::move(selected);
}

template <class Optimizer>
[[noreturn]] void refuse_several(const CheckpointReader& reader,
                                 const std::vector<Optimizer>& optimizers) {
  std::string found;
  std::string last;
  for (const Optimizer& optimizer : optimizers) {
    const std::string& root = optimizer.root;
    const std::string name = root.empty() ? "state" : root.substr(0, root.size() - 1);
    found += (found.empty() ? "" : ", ") + printable(name);
    if (!root.empty()) last = name;
  }
  throw Error::expected(ErrorKind::mismatch, {.path = reader.path()}, kStateNumbersRule,
                        "one optimizer at a time", std::to_string(optimizers.size()) + ": " + found,
                        {Remedy::Action::leave_out, glob_of(last)});
}

/// Throws if a rank has its own lists of the parameters of the optimizer `root`, and they are
/// moved. State that is equal on all ranks is stored once, so it can have only one name.
void refuse_lists_of_ranks(const CheckpointReader& reader, const NameSelection& only,
                           const std::string& root) {
  PlanOptions options;
  options.only = only;
  const MovedSelection moved(reader.contents(), options);
  for (const ValueEntry& value : reader.contents().values) {
    const std::string_view shared = formats::name_without_rank(value.name);
    if (shared.size() == value.name.size() || !shared.starts_with(root)) continue;
    const std::string_view entry = shared.substr(root.size());
    const bool is_list = entry == kGroups || (entry.starts_with(std::string(kGroups) + ".") &&
                                              entry.ends_with("." + std::string(kParams)));
    if (!is_list || !moved.contains(value.name)) continue;
    throw Error::expected(ErrorKind::mismatch, {.path = reader.path(), .fqn = value.name},
                          kStateNumbersRule, "the same parameters in the same order on all ranks",
                          "a list that only this rank has");
  }
}

/// Adds the names in a list `params`. Returns whether the value is a list of texts.
bool add_names(const Value& params, std::vector<std::string>& names) {
  const auto* const list = params.get_if<Value::List>();
  if (list == nullptr) return false;
  for (const Value& item : *list) {
    const auto* const name = item.get_if<std::string>();
    if (name == nullptr) return false;
    names.push_back(*name);
  }
  return true;
}

/// Returns the optimizer; nothing if `params` of a group is not a list of names, or all are empty.
std::optional<NamedOptimizer> read_named(const CheckpointReader& reader, const std::string& root,
                                         const GroupValues& groups) {
  NamedOptimizer optimizer{.root = root, .names = {}, .values = {}};
  bool are_names = true;
  if (groups.whole) {
    const Value value = reader.read_value(*groups.whole);
    const auto* const list = value.get_if<Value::List>();
    for (const Value& group : list == nullptr ? Value::List() : *list) {
      const Value* const params = group.find(kParams);
      are_names = are_names && params != nullptr && add_names(*params, optimizer.names);
    }
    optimizer.values.push_back(*groups.whole);
  }
  for (const auto& [group, index] : groups.params) {
    are_names = are_names && add_names(reader.read_value(index), optimizer.names);
    optimizer.values.push_back(index);
  }
  if (!are_names || optimizer.names.empty()) return std::nullopt;
  return optimizer;
}

}  // namespace

std::string_view NumberPlace::root(std::string_view name) const {
  return name.substr(0, begin - kState.size() - 1);
}

std::string_view NumberPlace::number(std::string_view name) const {
  return name.substr(begin, end - begin);
}

std::string_view NumberPlace::entry(std::string_view name) const {
  return end < name.size() ? name.substr(end + 1) : std::string_view();
}

bool NumberPlace::is_of(std::string_view name, std::string_view optimizer_root) const {
  const std::string_view whole = root(name);
  return whole == optimizer_root || formats::name_without_rank(whole) == optimizer_root;
}

bool is_flat_state(const formats::TensorEntry& tensor) {
  return tensor.meta.shape.size() == 1 && !tensor.pieces.empty() &&
         formats::has_only_flat_ranges(tensor);
}

std::vector<NumberPlace> number_places(std::string_view name, const KeyPath& path) {
  std::vector<NumberPlace> places;
  if (name.find("state.") == std::string_view::npos) return places;
  const std::vector<Component> parts = components_of(name, path);
  for (std::size_t i = 1; i < parts.size(); ++i) {
    if (parts[i - 1].text != kState || parts[i - 1].is_position) continue;
    if (parts[i].is_position || !is_number(parts[i].text)) continue;
    places.push_back({parts[i].begin, parts[i].begin + parts[i].text.size(), parts[i].key,
                      parts[i].begin_in_key});
  }
  return places;
}

std::size_t place_behind(std::string_view name, std::string_view front) {
  if (name.starts_with(front)) return front.size();
  const std::string_view shared = formats::name_without_rank(name);
  if (!shared.starts_with(front)) return std::string_view::npos;
  return name.size() - shared.size() + front.size();
}

KeyPath path_with_name(KeyPath path, const NumberPlace& place, const std::string& name) {
  if (path.empty()) return path;
  Key& key = path[place.key];
  if (auto* text = std::get_if<std::string>(&key)) {
    text->replace(place.begin_in_key, place.end - place.begin, name);
  } else {
    key = name;
  }
  return path;
}

std::size_t NumberedOptimizer::num_params() const {
  std::size_t num = 0;
  for (const auto& group : groups) num += group.size();
  return num;
}

NumberedOptimizer find_numbered_optimizer(const CheckpointReader& reader,
                                          const NameSelection& only) {
  std::vector<NumberedOptimizer> optimizers;
  for (const auto& [root, groups] : find_groups(reader)) {
    if (auto optimizer = GroupsReader(reader, root, groups).read()) {
      optimizers.push_back(std::move(*optimizer));
    }
  }
  if (optimizers.empty()) refuse_none(reader);
  if (optimizers.size() > 1) select(reader, only, optimizers);
  if (optimizers.size() > 1) refuse_several(reader, optimizers);
  refuse_lists_of_ranks(reader, only, optimizers.front().root);
  check_numbers(reader, optimizers.front());
  return std::move(optimizers.front());
}

NamedOptimizer find_named_optimizer(const CheckpointReader& reader, const NameSelection& only) {
  std::vector<NamedOptimizer> optimizers;
  for (const auto& [root, groups] : find_groups(reader)) {
    if (auto optimizer = read_named(reader, root, groups)) {
      optimizers.push_back(std::move(*optimizer));
    }
  }
  if (optimizers.empty()) refuse_no_names(reader);
  if (optimizers.size() > 1) select(reader, only, optimizers);
  if (optimizers.size() > 1) refuse_several(reader, optimizers);
  refuse_lists_of_ranks(reader, only, optimizers.front().root);
  return std::move(optimizers.front());
}

Value params_with_names(Value value, const std::map<std::string, std::string>& names) {
  auto* list = value.get_if<Value::List>();
  TESSERA_CHECK(list != nullptr);  // find_numbered_optimizer has checked it
  for (Value& item : *list) {
    if (const auto* number = item.get_if<std::int64_t>()) {
      item = names.at(std::to_string(*number));
    } else if (auto* group = item.get_if<Value::Dict>()) {
      for (auto& [key, member] : *group) {
        if (key == Value(std::string(kParams))) member = params_with_names(member, names);
      }
    }
  }
  return value;
}

}  // namespace tessera::reshard
