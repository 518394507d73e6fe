#include "runtime/state/value_tree.h"

#include <algorithm>
#include <cctype>
#include <variant>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::state {
namespace {

using formats::KeyPath;

bool begins_with(const KeyPath& path, const KeyPath& front) {
  return path.size() >= front.size() && std::equal(front.begin(), front.end(), path.begin());
}

KeyPath steps_of(const std::string& name) {
  KeyPath path;
  for (std::size_t at = 0; at <= name.size();) {
    const std::size_t dot = std::min(name.find('.', at), name.size());
    const std::string step = name.substr(at, dot - at);
    const bool is_number =
        !step.empty() && step.size() < 10 &&
        std::ranges::all_of(step, [](unsigned char c) { return std::isdigit(c) != 0; });
    if (is_number) {
      path.emplace_back(static_cast<std::int64_t>(std::stoll(step)));
    } else {
      path.emplace_back(step);
    }
    at = dot + 1;
  }
  return path;
}

}  // namespace

void ValueTree::add_leaf(KeyPath path, Value value) {
  const std::string name = formats::spell(path);
  if (!leaves_.emplace(name, Leaf{std::move(path), std::move(value)}).second) {
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = name}, "key of a value",
                          "one that no other has", "a second one");
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

void ValueTree::add_renamed(const std::string& name, const std::string& new_name,
                            const KeyPath& path, Value value) {
  const bool is_same = name == new_name;
  add_leaf(is_same && !path.empty() ? path : steps_of(new_name), std::move(value));
}

std::optional<Value> ValueTree::find(const KeyPath& path) const {
  // The steps right below, in order of key.
  std::vector<std::variant<std::string, std::int64_t>> steps;
  for (const auto& [name, leaf] : leaves_) {
    if (!begins_with(leaf.path, path)) continue;
    if (leaf.path.size() == path.size()) return leaf.value;
    const auto& step = leaf.path[path.size()];
    if (std::ranges::find(steps, step) == steps.end()) steps.push_back(step);
  }
  if (steps.empty()) return std::nullopt;
  std::ranges::sort(steps);
  Value::Dict dict;
  Value::List list;
  for (const auto& step : steps) {
    KeyPath below = path;
    below.push_back(step);
    Value item = *find(below);
    if (const auto* text = std::get_if<std::string>(&step)) {
      dict.emplace_back(*text, std::move(item));
    } else {
      list.push_back(std::move(item));
    }
  }
  if (dict.empty()) return Value(std::move(list));
  return Value(std::move(dict));
}

}  // namespace tessera::state
