#include "formats/deepspeed/universal_entries.h"
#include "base/text_parts.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "formats/deepspeed/client_state.h"
#include "formats/deepspeed/model_states_reader.h"
#include "formats/key_order.h"
#include "tessera/base/error.h"

namespace tessera::formats::deepspeed {
namespace {

using tessera::detail::split;
using tessera::detail::take_prefix;

constexpr std::string_view kModel = "model";
constexpr std::string_view kOptim = "optim";
constexpr std::string_view kState = "state";
constexpr std::string_view kParamGroups = "param_groups";
constexpr std::string_view kDeepSpeed = "deepspeed";
constexpr std::string_view kOptimizerStates = "optimizer_state_dict";

bool is_text(const Key& key, std::string_view text) {
  const auto* const string = std::get_if<std::string>(&key);
  return string != nullptr && *string == text;
}

/// Splits a name such as `optim.state.up.weight.exp_avg` into its key path: optim, state,
/// up.weight, exp_avg. Returns an empty path for names that are not of the optimizer or of
/// DeepSpeed.
KeyPath path_in_name(std::string_view name) {
  KeyPath path;
  std::string_view rest = name;
  if (take_prefix(rest, "optim.state.")) {
    const std::size_t dot = rest.rfind('.');
    if (dot == std::string_view::npos) return {};
    return {std::string(kOptim), std::string(kState), std::string(rest.substr(0, dot)),
            std::string(rest.substr(dot + 1))};
  }
  if (!rest.starts_with("optim.param_groups.") && !rest.starts_with("deepspeed.")) return {};
  for (const std::string_view part : split(rest, '.')) path.emplace_back(std::string(part));
  return path;
}

std::optional<std::int64_t> position_in(const Key& key) {
  if (const auto* const position = std::get_if<std::int64_t>(&key)) return *position;
  const std::string text = spell({key});
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool is_number = error == std::errc() && end == text.data() + text.size();
  return is_number ? std::optional(number) : std::nullopt;
}

KeyPath behind(const KeyPath& path, std::size_t num_keys) {
  return {path.begin() + static_cast<std::ptrdiff_t>(num_keys), path.end()};
}

bool has_dict(const Value& value) {
  if (value.is<Value::Dict>()) return true;
  const auto* const list = value.get_if<Value::List>();
  return list != nullptr && std::ranges::any_of(*list, has_dict);
}

bool is_empty(const Value& value) {
  const auto* const dict = value.get_if<Value::Dict>();
  const auto* const list = value.get_if<Value::List>();
  return (dict != nullptr && dict->empty()) || (list != nullptr && list->empty());
}

/// Whether DeepSpeed's files have a place for an empty dict or list at this path, which begins with
/// `optim` or `deepspeed`. They have none for `optim.state.<fqn>` or for a shorter path.
bool has_place(const KeyPath& path) {
  return path.size() > (is_text(path[0], kOptim) ? 3 : 1);
}

const std::string& name_of(const TensorEntry& tensor) {
  return tensor.meta.fqn;
}
const std::string& name_of(const Alias& alias) {
  return alias.fqn;
}
const std::string& name_of(const ValueEntry& value) {
  return value.name;
}

/// Returns whether the tensors at the top are the module's: no entry is below a key `model`,
/// `optim` or `deepspeed`, and no entry has a flat name that `path_in_name` splits.
bool is_bare(const CheckpointContents& contents) {
  const auto is_known = [](const std::string& name, const KeyPath& path) {
    if (path.size() < 2) return !path_in_name(name).empty();
    return is_text(path[0], kModel) || is_text(path[0], kOptim) || is_text(path[0], kDeepSpeed);
  };
  const auto is_known_entry = [&](const auto& entry) {
    return is_known(name_of(entry), entry.key_path);
  };
  return std::ranges::none_of(contents.tensors, is_known_entry) &&
         std::ranges::none_of(contents.aliases, is_known_entry) &&
         std::ranges::none_of(contents.values, is_known_entry);
}

/// Returns the key path of an entry. A flat name is split by `path_in_name` or, unless the
/// checkpoint is bare (is_bare), after `model.`. Any other flat name is a path of one key.
KeyPath path_in_dicts(const std::string& name, const KeyPath& key_path, bool bare) {
  const bool is_name = key_path.size() == 1 && std::holds_alternative<std::string>(key_path[0]);
  if (!key_path.empty() && !is_name) return key_path;
  KeyPath path = path_in_name(name);
  if (!path.empty()) return path;
  std::string_view rest = name;
  if (!bare && take_prefix(rest, "model.")) return {std::string(kModel), std::string(rest)};
  return {name};
}

/// Returns the path of a tensor's name. In a bare checkpoint, a tensor at the top is the module's.
KeyPath path_of_tensor(const std::string& name, const KeyPath& key_path, bool bare) {
  KeyPath path = path_in_dicts(name, key_path, bare);
  if (bare && path.size() == 1) path.insert(path.begin(), std::string(kModel));
  return path;
}

class Sorter {
 public:
  Sorter(const CheckpointContents& contents, const std::vector<Value>& values,
         const std::string& destination)
      : contents_(contents),
        values_(values),
        destination_(destination),
        is_bare_(is_bare(contents)),
        restored_(members_to_restore()) {
    const std::vector<std::uint32_t> numbers = entries_in_dict_order(contents);
    places_.resize(numbers.size());
    for (std::size_t i = 0; i < numbers.size(); ++i) places_[numbers[i]] = i;
  }

  UniversalEntries sort() && {
    std::size_t number = 0;  // of the entry, as in key_order.h
    for (std::size_t i = 0; i < contents_.tensors.size(); ++i) {
      const TensorEntry& tensor = contents_.tensors[i];
      place_ = places_[number++];
      add_tensor(tensor.meta.fqn, tensor.key_path, i);
    }
    for (const Alias& alias : contents_.aliases) {
      const TensorEntry* const target = contents_.find_tensor(alias.target);
      TESSERA_CHECK(target != nullptr);
      const auto tensor = static_cast<std::size_t>(target - contents_.tensors.data());
      place_ = places_[number++];
      add_alias(alias, tensor);
    }
    for (std::size_t i = 0; i < values_.size(); ++i) {
      const ValueEntry& value = contents_.values[i];
      place_ = places_[number++];
      add_opened(value.name, path_in_dicts(value.name, value.key_path, is_bare_), values_[i]);
    }
    for (auto& [group_number, group] : groups_) {
      if (group_number != static_cast<std::int64_t>(sorted_.groups.size())) {
        refuse(group.fields.empty() ? "optim.param_groups" : group.fields.front().name, "groups",
               "group " + std::to_string(sorted_.groups.size()) + " next",
               "group " + std::to_string(group_number));
      }
      sorted_.groups.push_back(std::move(group));
    }
    sort_places();
    return std::move(sorted_);
  }

 private:
  [[noreturn]] void refuse(const std::string& name, std::string_view rule,
                           std::string_view expected, std::string_view found,
                           std::string_view advice = {}) const {
    throw Error::expected(ErrorKind::unsupported, {.path = destination_, .fqn = name}, rule,
                          expected, found, advice);
  }

  /// Throws if two entries get the same name, such as a value `model.w` and a tensor `w` that
  /// becomes `model.w`: a reader could not tell them apart.
  void require_names_once(const CheckpointContents& leaves) const {
    std::set<std::string_view> names;
    for (const ValueEntry& leaf : leaves.values) {
      if (names.insert(leaf.name).second) continue;
      refuse(leaf.name, "names", "one entry of this name in DeepSpeed's files", "two",
             "rename one of them");
    }
  }

  /// Fills `sorted_.order`, unless it is the order of names.
  void sort_places() {
    std::ranges::stable_sort(places_of_leaves_, {}, &PlaceOfLeaf::place);
    CheckpointContents leaves;
    for (PlaceOfLeaf& leaf : places_of_leaves_) {
      const auto place = static_cast<std::uint32_t>(leaves.values.size() + 1);
      leaves.values.push_back({spell(leaf.path), std::move(leaf.path), place});
    }
    require_names_once(leaves);
    if (num_reordered_dicts(leaves) == 0) return;
    for (ValueEntry& leaf : leaves.values) sorted_.order.push_back(std::move(leaf.name));
  }

  void add_tensor(const std::string& name, const KeyPath& key_path, std::size_t tensor) {
    const KeyPath path = path_of_tensor(name, key_path, is_bare_);
    remember_place(path);
    if (path.size() > 1 && is_text(path[0], kModel)) {
      const KeyPath within = behind(path, 1);
      sorted_.weights.emplace(spell(within), Leaf{name, within, tensor});
      tensors_of_weights_.insert(tensor);
    } else {
      add(name, path, tensor);
    }
  }

  void add_alias(const Alias& alias, std::size_t tensor) {
    const KeyPath path = path_of_tensor(alias.fqn, alias.key_path, is_bare_);
    remember_place(path);
    const bool is_of_module = path.size() > 1 && is_text(path[0], kModel);
    if (!is_of_module) return add(alias.fqn, path, tensor);
    const KeyPath within = behind(path, 1);
    if (tensors_of_weights_.insert(tensor).second) {
      sorted_.weights.emplace(spell(within), Leaf{alias.fqn, within, tensor});
    } else {
      sorted_.ties.emplace(spell(within), tensor);
      sorted_.tie_paths.emplace(spell(within), within);
    }
  }

  /// Adds a value. Below `optim` or `deepspeed`: adds the items of a dict, or of a list with dicts.
  void add_opened(const std::string& name, const KeyPath& path, const Value& value) {
    const bool is_known = is_text(path[0], kOptim) || is_text(path[0], kDeepSpeed);
    if (is_known && is_empty(value) && !has_place(path)) {
      remember_place(path);
      sorted_.empty.push_back({name, path, value});
      return;
    }
    const auto* const dict = is_known ? value.get_if<Value::Dict>() : nullptr;
    if (dict != nullptr && !dict->empty()) {
      for (const auto& [key, item] : *dict) {
        KeyPath inner = path;
        inner.push_back(dict_key(key).value_or(Key(value_to_string(key))));
        add_opened(name, inner, item);
      }
      return;
    }
    const auto* const list = is_known && has_dict(value) ? value.get_if<Value::List>() : nullptr;
    if (list != nullptr) {
      for (std::size_t i = 0; i < list->size(); ++i) {
        KeyPath inner = path;
        inner.emplace_back(static_cast<std::int64_t>(i));
        add_opened(name, inner, (*list)[i]);
      }
      return;
    }
    remember_place(path);
    add(name, path, value);
  }

  /// Remembers that the entry with this path has the place `place_`. If the path does not follow
  /// from the names in DeepSpeed's files, also adds it to `sorted_.paths`.
  void remember_place(const KeyPath& path) {
    places_of_leaves_.push_back({place_, path});
    const bool is_of_state =
        path.size() > 2 && is_text(path[0], kOptim) && is_text(path[1], kState);
    if (!is_of_state && !(path.size() > 1 && is_text(path[0], kModel))) return;
    const auto is_string = [](const Key& key) { return std::holds_alternative<std::string>(key); };
    const bool is_told =
        path.size() == (is_of_state ? 4 : 2) && std::ranges::all_of(path, is_string);
    if (!is_told) sorted_.paths.push_back(path);
  }

  /// Returns the members of `client_state` that are written without this key ([Note: Members that
  /// clash]): an entry of the member clashes with an own entry, and no other entry of the user has
  /// the member's name as its outermost key.
  std::set<std::string> members_to_restore() const {
    std::map<std::string, std::vector<std::string>> names_of;  // names without `client_state`
    std::vector<std::string> own;
    std::set<std::string> others;
    const auto look_at = [&](const auto& entry) {
      const KeyPath path = path_in_dicts(name_of(entry), entry.key_path, is_bare_);
      if (path.size() > 1 && is_text(path[0], kClientState)) {
        names_of[spell({path[1]})].push_back(spell(behind(path, 1)));
        return;
      }
      own.push_back(spell(path));
      const bool is_of_user = !is_text(path[0], kModel) && !is_text(path[0], kOptim) &&
                              (!is_text(path[0], kDeepSpeed) || num_keys_of_deepspeed(path) == 0);
      if (is_of_user) others.insert(spell({path[0]}));
    };
    for (const TensorEntry& tensor : contents_.tensors) look_at(tensor);
    for (const Alias& alias : contents_.aliases) look_at(alias);
    for (const ValueEntry& value : contents_.values) look_at(value);
    const OwnNames own_names(std::move(own));
    std::set<std::string> restored;
    for (const auto& [member, names] : names_of) {
      const auto clashes = [&](const std::string& name) { return own_names.clashes(name); };
      if (!others.contains(member) && std::ranges::any_of(names, clashes)) restored.insert(member);
    }
    return restored;
  }

  /// Returns how many outermost keys of an entry `deepspeed.<member>` are not written: 0 for a
  /// member that DeepSpeed does not write itself, which stays in a dict `deepspeed`.
  static std::size_t num_keys_of_deepspeed(const KeyPath& path) {
    if (path.size() < 2) return 0;
    if (is_text(path[1], kOptimizerStates) && path.size() > 2) return 2;
    const auto* const member = std::get_if<std::string>(&path[1]);
    return member != nullptr && is_member_of_deepspeed(*member) ? 1 : 0;
  }

  /// Adds an entry that is no tensor of the module.
  void add(const std::string& name, const KeyPath& path, std::variant<std::size_t, Value> content) {
    if (path.size() > 1 && is_text(path[0], kClientState) && restored_.contains(spell({path[1]}))) {
      sorted_.model_members.push_back({name, behind(path, 1), std::move(content)});
    } else if (is_text(path[0], kModel)) {
      sorted_.module_values.push_back({name, behind(path, 1), std::move(content)});
    } else if (is_text(path[0], kOptim) && path.size() > 1) {
      add_of_optimizer(name, path, std::move(content));
    } else if (is_text(path[0], kDeepSpeed) && path.size() > 1) {
      const std::size_t num_keys = num_keys_of_deepspeed(path);
      auto& members = num_keys == 2 ? sorted_.optimizer_members : sorted_.model_members;
      members.push_back({name, behind(path, num_keys), std::move(content)});
    } else {
      require_of_user(name, path[0]);
      sorted_.model_members.push_back({name, path, std::move(content)});
    }
  }

  void add_of_optimizer(const std::string& name, const KeyPath& path,
                        std::variant<std::size_t, Value> content) {
    if (is_text(path[1], kState) && path.size() > 3) {
      KeyPath parameter = behind(path, 2);
      KeyPath kind{parameter.back()};
      parameter.pop_back();
      sorted_.state[spell(parameter)].push_back({name, std::move(kind), std::move(content)});
      return;
    }
    const auto group =
        is_text(path[1], kParamGroups) && path.size() > 3 ? position_in(path[2]) : std::nullopt;
    if (!group || *group < 0) {
      refuse(name, "optimizer", "optim.state.<fqn>.<name> or optim.param_groups.<number>.<name>",
             "another name");
    }
    if (path.size() == 4 && is_text(path[3], "params")) return add_params(name, *group, content);
    groups_[*group].fields.push_back({name, behind(path, 3), std::move(content)});
  }

  void add_params(const std::string& name, std::int64_t group,
                  const std::variant<std::size_t, Value>& content) {
    const auto* const value = std::get_if<Value>(&content);
    const auto* const tuple = value == nullptr ? nullptr : value->get_if<Value::Tuple>();
    const auto* list = value == nullptr ? nullptr : value->get_if<Value::List>();
    if (tuple != nullptr) list = &tuple->items;
    if (list == nullptr) refuse(name, "groups", "a list of names", "another kind of value");
    for (const Value& item : *list) {
      const auto* const parameter = item.get_if<std::string>();
      if (parameter == nullptr) {
        throw Error::expected(ErrorKind::unsupported, {.path = destination_, .fqn = name},
                              "optimizer", "names of parameters", "numbers",
                              Remedy{Remedy::Action::name_params});
      }
      groups_[group].params.push_back(*parameter);
    }
    groups_[group].lists_params = true;
  }

  void require_of_user(const std::string& name, const Key& key) const {
    const auto* const text = std::get_if<std::string>(&key);
    if (text == nullptr) refuse(name, "names", "a text as the first key", spell({key}));
    if (!is_consumed_member(*text) && !is_member_of_deepspeed(*text)) return;
    refuse(name, "names", "a name that DeepSpeed does not use itself", *text, "rename the entry");
  }

  const CheckpointContents& contents_;
  const std::vector<Value>& values_;
  const std::string& destination_;
  bool is_bare_;
  std::set<std::string> restored_;
  struct PlaceOfLeaf {
    std::size_t place;
    KeyPath path;
  };
  std::vector<std::size_t> places_;  // of the contents' entries, in the order of keys
  std::size_t place_ = 0;            // of the entry that is being sorted
  std::vector<PlaceOfLeaf> places_of_leaves_;
  std::set<std::size_t> tensors_of_weights_;
  std::map<std::int64_t, ParamGroup> groups_;
  UniversalEntries sorted_;
};

}  // namespace

const Leaf* step_in(const std::vector<Leaf>& state) {
  const auto step =
      std::ranges::find_if(state, [](const Leaf& leaf) { return spell(leaf.path) == kStep; });
  return step == state.end() ? nullptr : &*step;
}

std::size_t num_bare_tensors(const CheckpointContents& contents) {
  if (!is_bare(contents)) return 0;
  const auto is_at_top = [](const auto& entry) { return entry.key_path.size() < 2; };
  return static_cast<std::size_t>(std::ranges::count_if(contents.tensors, is_at_top) +
                                  std::ranges::count_if(contents.aliases, is_at_top));
}

std::size_t num_keys_into_model(const CheckpointContents& contents) {
  std::size_t num_flat = 0;
  bool has_model = false;
  const auto look_at = [&](const auto& entry) {
    const KeyPath& path = entry.key_path;
    has_model = has_model || (path.size() > 1 && is_text(path[0], kModel));
    if (path.size() < 2 && name_of(entry).starts_with("model.")) ++num_flat;
  };
  std::ranges::for_each(contents.tensors, look_at);
  std::ranges::for_each(contents.aliases, look_at);
  std::ranges::for_each(contents.values, look_at);
  return has_model ? num_flat : 0;
}

std::size_t num_split_ties(const CheckpointContents& contents) {
  const bool bare = is_bare(contents);
  std::map<std::string_view, std::set<KeyPath>> places;  // by tensor: where its names belong
  const auto add_place = [&](const std::string& tensor, const auto& entry) {
    KeyPath place = path_of_tensor(name_of(entry), entry.key_path, bare);
    if (!is_text(place[0], kOptim)) place.resize(is_text(place[0], kModel) ? 1 : 0);
    places[tensor].insert(std::move(place));
  };
  for (const Alias& alias : contents.aliases) add_place(alias.target, alias);
  for (const TensorEntry& tensor : contents.tensors) {
    if (places.contains(tensor.meta.fqn)) add_place(tensor.meta.fqn, tensor);
  }
  std::size_t num_split = 0;
  for (const auto& [tensor, of_names] : places) num_split += of_names.size() - 1;
  return num_split;
}

UniversalEntries sort_entries(const CheckpointContents& contents, const std::vector<Value>& values,
                              const std::string& destination) {
  return Sorter(contents, values, destination).sort();
}

}  // namespace tessera::formats::deepspeed
