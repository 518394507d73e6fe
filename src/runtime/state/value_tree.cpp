#include "runtime/state/value_tree.h"

#include <algorithm>
#include <cctype>
#include <set>
#include <variant>
#include <vector>

#include "base/json.h"
#include "base/text_parts.h"
#include "tessera/base/error.h"

namespace tessera::state {
namespace {

using formats::KeyPath;

bool begins_with(const KeyPath& path, const KeyPath& front) {
  return path.size() >= front.size() && std::equal(front.begin(), front.end(), path.begin());
}

KeyPath keys_of(const std::string& name) {
  KeyPath path;
  for (const std::string_view part : tessera::detail::split(name, '.')) {
    const std::string key(part);
    const bool is_number =
        !key.empty() && key.size() < 10 &&
        std::ranges::all_of(key, [](unsigned char c) { return std::isdigit(c) != 0; });
    if (is_number) {
      path.emplace_back(static_cast<std::int64_t>(std::stoll(key)));
    } else {
      path.emplace_back(key);
    }
  }
  return path;
}

/// Calls `visit` with each direct child of a value.
template <class Visit>
void for_each_item(const Value& value, const Visit& visit) {
  if (const auto* list = value.get_if<Value::List>()) std::ranges::for_each(*list, visit);
  if (const auto* tuple = value.get_if<Value::Tuple>()) std::ranges::for_each(tuple->items, visit);
  if (const auto* set = value.get_if<Value::Set>()) std::ranges::for_each(set->items, visit);
  if (const auto* dict = value.get_if<Value::Dict>()) {
    for (const auto& [key, item] : *dict) {
      visit(key);
      visit(item);
    }
  }
}

}  // namespace

// Goes level by level instead of recursively, because values may be nested very deeply.
void check_depth(const std::string& name, const Value& value) {
  std::vector<const Value*> level = {&value};
  for (int depth = 0; !level.empty(); ++depth) {
    std::vector<const Value*> next;
    for (const Value* each : level) {
      for_each_item(*each, [&](const Value& item) { next.push_back(&item); });
    }
    if (depth == kMaxValueDepth && !next.empty()) {
      throw Error::expected(ErrorKind::unsupported, {.fqn = name}, "value",
                            "at most " + std::to_string(kMaxValueDepth) + " levels", "more");
    }
    level = std::move(next);
  }
}

Value parse_message(const std::string& text) {
  constexpr int kMaxDepth = 3 * kMaxValueDepth + 10;
  return value_from_json(parse_json(text, "message of a rank", {.max_depth = kMaxDepth}), "");
}

void ValueTree::add_leaf(KeyPath path, Value value) {
  const std::string name = formats::spell(path);
  if (!leaves_.emplace(name, Leaf{std::move(path), std::move(value)}).second) {
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = name}, "key of a value",
                          "a unique key", "a duplicate");
  }
}

void ValueTree::add(const KeyPath& path, const Value& value) {
  const auto* const dict = value.get_if<Value::Dict>();
  const bool is_nested =
      dict != nullptr && !dict->empty() && std::ranges::all_of(*dict, [](const auto& item) {
        return item.first.template is<std::string>();
      });
  if (!is_nested) return add_leaf(path, value);
  for (const auto& [key, item] : *dict) {
    KeyPath below = path;
    below.emplace_back(*key.get_if<std::string>());
    add(below, item);
  }
}

void ValueTree::add_renamed(const std::string& new_name, const KeyPath& path, Value value) {
  // Keys after the renamed part keep their type: the key '0' of a dict stays a string.
  for (auto kept = path.begin(); kept != path.end(); ++kept) {
    const std::string back = formats::spell({kept, path.end()});
    if (!new_name.ends_with(back)) continue;
    std::string front = new_name.substr(0, new_name.size() - back.size());
    if (!front.empty() && front.back() != '.') continue;
    if (!front.empty()) front.pop_back();
    KeyPath new_path = front.empty() ? KeyPath() : keys_of(front);
    new_path.insert(new_path.end(), kept, path.end());
    return add_leaf(std::move(new_path), std::move(value));
  }
  add_leaf(keys_of(new_name), std::move(value));
}

std::optional<Value> ValueTree::find(const KeyPath& path) const {
  const std::string name = formats::spell(path);
  const auto leaf = leaves_.find(name);
  if (leaf != leaves_.end() && leaf->second.path == path) return leaf->second.value;
  // The keys of the direct children, sorted.
  std::set<formats::Key> keys;
  const std::string prefix = name.empty() ? name : name + ".";
  for (auto it = leaves_.lower_bound(prefix); it != leaves_.end() && it->first.starts_with(prefix);
       ++it) {
    const KeyPath& its_path = it->second.path;
    if (its_path.size() > path.size() && begins_with(its_path, path)) {
      keys.insert(its_path[path.size()]);
    }
  }
  if (keys.empty()) return std::nullopt;
  Value::Dict dict;
  Value::List list;
  for (const formats::Key& key : keys) {
    KeyPath below = path;
    below.push_back(key);
    Value item = *find(below);
    if (const auto* text = std::get_if<std::string>(&key)) {
      dict.emplace_back(*text, std::move(item));
    } else if (const auto* other = std::get_if<formats::NonStringKey>(&key)) {
      dict.emplace_back(formats::dict_key_value(*other), std::move(item));
    } else {
      list.push_back(std::move(item));
    }
  }
  if (dict.empty()) return Value(std::move(list));
  return Value(std::move(dict));
}

}  // namespace tessera::state
