#include "formats/torch_zip/state_dict_pickle.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "base/json.h"
#include "formats/per_rank.h"
#include "formats/pickle/pickler.h"
#include "formats/torch_zip/torch_save_layout.h"
#include "tessera/base/error.h"

namespace tessera::formats::torch_zip {
namespace {

constexpr std::size_t kMaxKeys = 64;

/// The object at the end of a key path: a tensor, by its place in the contents, or a value.
struct Entry {
  const std::string* name;
  KeyPath path;
  std::variant<std::size_t, const Value*> content;
  std::uint32_t dict_order;
};

/// Returns all entries, sorted by their paths.
std::vector<Entry> entries_of(const CheckpointContents& contents,
                              const std::vector<Value>& values) {
  std::vector<Entry> entries;
  const auto add = [&](const std::string& name, const KeyPath& path, auto content,
                       std::uint32_t dict_order) {
    entries.push_back({&name, path.empty() ? KeyPath{name} : path, content, dict_order});
  };
  for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
    const TensorEntry& tensor = contents.tensors[i];
    add(tensor.meta.fqn, tensor.key_path, i, tensor.dict_order);
  }
  for (const Alias& alias : contents.aliases) {
    const TensorEntry* target = contents.find_tensor(alias.target);
    TESSERA_CHECK(target != nullptr);
    add(alias.fqn, alias.key_path, static_cast<std::size_t>(target - contents.tensors.data()),
        alias.dict_order);
  }
  for (std::size_t i = 0; i < contents.values.size(); ++i) {
    const ValueEntry& value = contents.values[i];
    add(value.name, value.key_path, &values[i], value.dict_order);
  }
  std::ranges::sort(entries, {}, &Entry::path);
  return entries;
}

/// Returns a text that is equal for keys that Python treats as equal, such as 1, 1.0 and True.
std::string text_of_equal_keys(const Value& key) {
  if (const auto* boolean = key.get_if<bool>()) return *boolean ? "1" : "0";
  if (const auto* tuple = key.get_if<Value::Tuple>()) {
    std::string text = "(";
    for (const Value& item : tuple->items) text += text_of_equal_keys(item) + ",";
    return text + ")";
  }
  constexpr double kBound = 0x1p63;
  const auto* number = key.get_if<double>();
  if (number != nullptr && std::trunc(*number) == *number && std::abs(*number) < kBound) {
    return std::to_string(static_cast<std::int64_t>(*number));
  }
  return value_to_json(key);
}

class StateDictPickler {
 public:
  StateDictPickler(const CheckpointContents& contents, const std::string& destination,
                   const std::vector<PickledObject>& objects, const PushTensor& push_tensor)
      : contents_(contents),
        destination_(destination),
        objects_(objects),
        push_tensor_(push_tensor) {}

  std::string pickle(std::span<const Entry> entries) && {
    if (entries.empty()) {
      pickler_.empty_dict();
    } else {
      push(entries, 0);
    }
    return std::move(pickler_).finish();
  }

 private:
  [[noreturn]] void refuse(const Entry& entry, std::string_view rule, const std::string& expected,
                           const std::string& found) const {
    throw Error::expected(ErrorKind::invalid_argument, {.path = destination_, .fqn = *entry.name},
                          rule, expected, found);
  }

  /// Writes the dict, list, tensor or value that the entries form. All entries have the same first
  /// `depth` keys.
  void push(std::span<const Entry> entries, std::size_t depth) {
    const Entry& first = entries.front();
    if (first.path.size() > kMaxKeys) {
      refuse(first, "key path", "at most " + std::to_string(kMaxKeys) + " keys",
             std::to_string(first.path.size()));
    }
    if (first.path.size() == depth) return push_content(first);
    if (std::holds_alternative<std::int64_t>(first.path[depth])) {
      if (is_part_of_list(entries, depth)) return push_dict(entries, depth);
      return push_list(entries, depth);
    }
    const PickledObject* const object = object_at(first.path, depth);
    if (object == nullptr) return push_dict(entries, depth);
    pickler_.global(object->module, object->name);
    pickler_.empty_tuple();
    pickler_.new_object();
    push_dict(entries, depth);
    pickler_.build();
  }

  /// Returns whether the entries are a list under `per_rank.<rank>` whose reader would not find the
  /// same entries again: a position is missing, or the list has only values, so that it would
  /// become one value. `None` at a missing position would replace the item that all ranks share.
  static bool is_part_of_list(std::span<const Entry> entries, std::size_t depth) {
    if (!parse_per_rank_name(*entries.front().name)) return false;
    bool has_only_values = true;
    for (std::int64_t next = 0; !entries.empty(); ++next) {
      const Entry& first = entries.front();
      if (first.path[depth] != Key(next)) return true;
      has_only_values = has_only_values && first.path.size() == depth + 1 &&
                        std::holds_alternative<const Value*>(first.content);
      take_item(entries, depth);
    }
    return has_only_values;
  }

  /// Returns the PickledObject whose path is the first `depth` keys of `path`; null if there is
  /// none.
  const PickledObject* object_at(const KeyPath& path, std::size_t depth) const {
    const auto front = std::span(path).first(depth);
    const auto found = std::ranges::find_if(objects_, [&](const PickledObject& object) {
      return std::ranges::equal(object.path, front);
    });
    return found == objects_.end() ? nullptr : &*found;
  }

  void push_dict(std::span<const Entry> entries, std::size_t depth) {
    pickler_.empty_dict();
    pickler_.mark();
    std::set<std::string> others;  // keys that are not strings
    for (const DictItem& item : items_in_order(entries, depth)) {
      const Entry& first = item.entries.front();
      const Key& key = first.path[depth];
      if (const auto* other = std::get_if<NonStringKey>(&key)) {
        if (!others.insert(text_of_equal_keys(dict_key_value(*other))).second) {
          refuse(first, "keys of a dict", "keys that differ in Python",
                 value_to_string(dict_key_value(*other)) + ", which equals another key");
        }
      }
      push_key(key);
      push(item.entries, depth + 1);
    }
    pickler_.set_items_from_mark();
  }

  /// The entries below one key of a dict, and the smallest `dict_order` of them.
  struct DictItem {
    std::span<const Entry> entries;
    std::uint32_t dict_order;
  };

  /// Returns the items of a dict in its order ([Note: Order of keys]).
  std::vector<DictItem> items_in_order(std::span<const Entry> entries, std::size_t depth) const {
    std::vector<DictItem> items;
    while (!entries.empty()) {
      const std::span<const Entry> item = take_item(entries, depth);
      items.push_back({item, std::ranges::min(item, {}, &Entry::dict_order).dict_order});
    }
    std::ranges::stable_sort(items, {}, &DictItem::dict_order);
    return contents_.aliases.empty() ? items : with_stored_names_first(items, depth);
  }

  /// Returns the tensor under the key of an item; nothing for a dict, a list or a value.
  static std::optional<std::size_t> tensor_of(const DictItem& item, std::size_t depth) {
    const Entry& entry = item.entries.front();
    const auto* const tensor = std::get_if<std::size_t>(&entry.content);
    if (tensor == nullptr || entry.path.size() != depth + 1) return std::nullopt;
    return *tensor;
  }

  bool has_stored_name(const DictItem& item, std::size_t tensor) const {
    return *item.entries.front().name == contents_.tensors[tensor].meta.fqn;
  }

  /// Moves other names of a tied tensor behind its stored name, if this is in the same dict:
  /// readers take the first one for the stored name. They are before it if the order of keys is
  /// that of the names (`lm_head.weight`, `model.embed_tokens.weight`).
  std::vector<DictItem> with_stored_names_first(std::span<const DictItem> items,
                                                std::size_t depth) const {
    std::set<std::size_t> still_to_come;  // tensors whose stored name is in this dict
    for (const DictItem& item : items) {
      const auto tensor = tensor_of(item, depth);
      if (tensor && has_stored_name(item, *tensor)) still_to_come.insert(*tensor);
    }
    std::map<std::size_t, std::vector<DictItem>> others;
    std::vector<DictItem> ordered;
    ordered.reserve(items.size());
    for (const DictItem& item : items) {
      const auto tensor = tensor_of(item, depth);
      if (!tensor || (!has_stored_name(item, *tensor) && !still_to_come.contains(*tensor))) {
        ordered.push_back(item);
      } else if (has_stored_name(item, *tensor)) {
        still_to_come.erase(*tensor);
        ordered.push_back(item);
        const auto waiting = others.find(*tensor);
        if (waiting == others.end()) continue;
        ordered.insert(ordered.end(), waiting->second.begin(), waiting->second.end());
      } else {
        others[*tensor].push_back(item);
      }
    }
    return ordered;
  }

  void push_key(const Key& key) {
    if (const auto* other = std::get_if<NonStringKey>(&key)) {
      pickle::pickle_value(pickler_, dict_key_value(*other));
    } else if (const auto* position = std::get_if<std::int64_t>(&key)) {
      pickler_.integer(*position);
    } else {
      pickler_.interned(std::get<std::string>(key));
    }
  }

  void push_list(std::span<const Entry> entries, std::size_t depth) {
    pickler_.empty_list();
    pickler_.mark();
    for (std::int64_t next = 0; !entries.empty(); ++next) {
      const std::int64_t position = std::get<std::int64_t>(entries.front().path[depth]);
      if (position < 0) {
        refuse(entries.front(), "position in a list", "0 or more", std::to_string(position));
      }
      if (position - next > holes_left_) {
        throw Error::expected(ErrorKind::unsupported,
                              {.path = destination_, .fqn = *entries.front().name},
                              "position in a list",
                              "at most " + std::to_string(next + holes_left_) +
                                  ", because too many positions before it have no entry",
                              std::to_string(position));
      }
      holes_left_ -= position - next;
      for (; next < position; ++next) pickler_.none();
      push(take_item(entries, depth), depth + 1);
    }
    pickler_.append_from_mark();
  }

  /// Takes from the front of `entries` all entries whose key number `depth` is the same. Returns
  /// them, and removes them from `entries`.
  static std::span<const Entry> take_item(std::span<const Entry>& entries, std::size_t depth) {
    const auto& key = entries.front().path[depth];
    const auto end =
        std::ranges::find_if(entries, [&](const Entry& entry) { return entry.path[depth] != key; });
    const auto num_taken = static_cast<std::size_t>(end - entries.begin());
    const std::span<const Entry> taken = entries.first(num_taken);
    entries = entries.subspan(num_taken);
    return taken;
  }

  void push_content(const Entry& entry) {
    if (const auto* tensor = std::get_if<std::size_t>(&entry.content)) {
      if (push_tensor_) return push_tensor_(pickler_, *tensor);
      const TensorMeta& meta = contents_.tensors[*tensor].meta;
      return pickle_tensor(pickler_, meta.dtype, meta.shape, std::to_string(*tensor));
    }
    try {
      pickle::pickle_value(pickler_, *std::get<const Value*>(entry.content));
    } catch (const Error& error) {
      throw Error(error.kind(), {.path = destination_, .fqn = *entry.name}, error.reason());
    }
  }

  const CheckpointContents& contents_;
  const std::string& destination_;
  const std::vector<PickledObject>& objects_;
  const PushTensor& push_tensor_;
  pickle::Pickler pickler_{2};
  std::int64_t holes_left_ = kMaxHoles;
};

}  // namespace

std::string pickle_state_dict(const CheckpointContents& contents, const std::vector<Value>& values,
                              const std::string& destination,
                              const std::vector<PickledObject>& objects,
                              const PushTensor& push_tensor) {
  TESSERA_CHECK(values.size() == contents.values.size());
  return StateDictPickler(contents, destination, objects, push_tensor)
      .pickle(entries_of(contents, values));
}

}  // namespace tessera::formats::torch_zip
