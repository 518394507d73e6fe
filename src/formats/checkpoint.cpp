#include "tessera/formats/checkpoint.h"

#include <algorithm>

#include "base/json.h"

namespace tessera::formats {

std::string opened_class_in_words(const OpenedClass& opened) {
  const bool is_one = opened.num_objects == 1;
  if (opened.as == OpenedClass::As::dict) {
    return std::to_string(opened.num_objects) + (is_one ? " object" : " objects") + " of class " +
           opened.name + ", read as " + (is_one ? "a dict" : "dicts");
  }
  return std::to_string(opened.num_objects) + (is_one ? " whole module" : " whole modules") +
         " of class " + opened.name + ", read as " + (is_one ? "its" : "their") + " state_dict()";
}

std::string_view state_kind_name(StateKind kind) {
  switch (kind) {
    case StateKind::plain:
      return "plain";
    case StateKind::pointwise:
      return "pointwise";
    case StateKind::row_wise:
      return "row_wise";
    case StateKind::scalar_parameter:
      return "scalar_parameter";
    case StateKind::scalar_table:
      return "scalar_table";
    case StateKind::opaque:
      return "opaque";
    case StateKind::row_wise_per_shard:
      return "row_wise_per_shard";
  }
  TESSERA_CHECK(false && "unnamed StateKind");
  return {};
}

Error finding_to_error(const Finding& finding) {
  return Error::expected(ErrorKind::mismatch, finding.where, finding.rule, finding.expected,
                         finding.found, finding.remedy);
}

std::string finding_to_string(const Finding& finding) {
  return finding_to_error(finding).what();
}

namespace {

// A key can be a nested tuple. Readers accept values nested 64 levels deep, and a tuple takes two
// levels of JSON, so 1000 levels are enough for any key.
constexpr JsonLimits kKeyLimits = {.max_depth = 1000};

bool is_hashable(const Value& key) {
  if (const auto* tuple = key.get_if<Value::Tuple>()) {
    return std::ranges::all_of(tuple->items, is_hashable);
  }
  return !key.is<Value::List>() && !key.is<Value::Set>() && !key.is<Value::Dict>();
}

struct KeySpeller {
  std::string operator()(const std::string& key) const { return key; }
  std::string operator()(std::int64_t position) const { return std::to_string(position); }
  std::string operator()(const NonStringKey& key) const {
    return value_to_string(dict_key_value(key));
  }
};

}  // namespace

std::optional<Key> dict_key(const Value& key) {
  if (const auto* text = key.get_if<std::string>()) return *text;
  if (!is_hashable(key)) return std::nullopt;
  return NonStringKey{value_to_json(key)};
}

Value dict_key_value(const NonStringKey& key) {
  const std::string what = "key of a dict";
  return value_from_json(parse_json(key.json, what, kKeyLimits), what);
}

Value key_path_to_value(const KeyPath& path) {
  struct KeyToValue {
    Value operator()(const std::string& key) const { return key; }
    Value operator()(std::int64_t position) const { return position; }
    Value operator()(const NonStringKey& key) const { return Value::List{dict_key_value(key)}; }
  };
  Value::List keys;
  for (const Key& key : path) keys.push_back(std::visit(KeyToValue{}, key));
  return keys;
}

namespace {

std::optional<Key> key_from_value(const Value& value) {
  if (const auto* key = value.get_if<std::string>()) return *key;
  if (const auto* position = value.get_if<std::int64_t>()) {
    return *position >= 0 ? std::optional<Key>(*position) : std::nullopt;
  }
  const auto* list = value.get_if<Value::List>();
  if (list == nullptr || list->size() != 1 || list->front().is<std::string>()) return std::nullopt;
  return dict_key(list->front());
}

}  // namespace

std::optional<KeyPath> key_path_from_value(const Value& value) {
  const auto* keys = value.get_if<Value::List>();
  if (keys == nullptr) return std::nullopt;
  KeyPath path;
  for (const Value& each : *keys) {
    std::optional<Key> key = key_from_value(each);
    if (!key) return std::nullopt;
    path.push_back(std::move(*key));
  }
  return path;
}

std::string spell(const KeyPath& path) {
  std::string spelled;
  for (std::size_t i = 0; i < path.size(); ++i) {
    if (i != 0) spelled += '.';
    spelled += std::visit(KeySpeller{}, path[i]);
  }
  return spelled;
}

std::string part_in_words(const PartOfWhole& part) {
  return std::string(part.unit == PartOfWhole::Unit::rank ? "one rank of " : "one file of ") +
         (part.num_parts ? std::to_string(*part.num_parts) : "several") + ": " + part.form;
}

const TensorEntry* CheckpointContents::find_tensor(std::string_view fqn) const {
  const auto it = std::lower_bound(
      tensors.begin(), tensors.end(), fqn,
      [](const TensorEntry& tensor, std::string_view name) { return tensor.meta.fqn < name; });
  return it != tensors.end() && it->meta.fqn == fqn ? &*it : nullptr;
}

}  // namespace tessera::formats
