#include "formats/key_order.h"

#include <algorithm>
#include <charconv>
#include <span>
#include <utility>
#include <variant>

#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

/// An entry of the nested state dict. Refers to the contents.
struct Entry {
  const std::string* name;
  const SharedKeyPath* key_path;
  std::uint32_t dict_order;
  std::uint32_t number;

  std::size_t num_keys() const { return key_path->empty() ? 1 : key_path->size(); }
  bool is_list_position(std::size_t depth) const {
    return !key_path->empty() && std::holds_alternative<std::int64_t>((*key_path)[depth]);
  }
};

/// Compares two keys at one depth, as Key does. An entry without a path has its name as key.
std::weak_ordering compare_keys(const Entry& a, const Entry& b, std::size_t depth) {
  if (!a.key_path->empty() && !b.key_path->empty()) {
    return (*a.key_path)[depth] <=> (*b.key_path)[depth];
  }
  if (a.key_path->empty() && b.key_path->empty()) return *a.name <=> *b.name;
  if (a.key_path->empty()) return 0 <=> compare_keys(b, a, depth);
  const auto* const text = std::get_if<std::string>(&(*a.key_path)[depth]);
  return text == nullptr ? std::weak_ordering::greater : *text <=> *b.name;
}

bool is_before(const Entry& a, const Entry& b) {
  const std::size_t num_common = std::min(a.num_keys(), b.num_keys());
  for (std::size_t depth = 0; depth < num_common; ++depth) {
    const std::weak_ordering order = compare_keys(a, b, depth);
    if (order != 0) return order < 0;
  }
  return a.num_keys() < b.num_keys();
}

/// Returns all entries, sorted by their paths.
std::vector<Entry> sorted_entries(const CheckpointContents& contents) {
  std::vector<Entry> entries;
  entries.reserve(contents.tensors.size() + contents.aliases.size() + contents.values.size());
  const auto add = [&](const std::string& name, const auto& entry) {
    const auto number = static_cast<std::uint32_t>(entries.size());
    entries.push_back({&name, &entry.key_path, entry.dict_order, number});
  };
  for (const TensorEntry& tensor : contents.tensors) add(tensor.meta.fqn, tensor);
  for (const Alias& alias : contents.aliases) add(alias.fqn, alias);
  for (const ValueEntry& value : contents.values) add(value.name, value);
  std::ranges::sort(entries, is_before);
  return entries;
}

struct WalkResult {
  std::vector<std::uint32_t> numbers;
  std::size_t num_reordered_dicts = 0;
};

/// Walks through the nested dicts and lists in the order of their keys.
class Walk {
 public:
  explicit Walk(std::size_t num_entries) { result_.numbers.reserve(num_entries); }

  /// Requires: all entries have the same first `depth` keys, and are sorted.
  void visit(std::span<const Entry> entries, std::size_t depth) {
    // A tensor or a value at the place of a dict; writers refuse such paths later.
    while (!entries.empty() && entries.front().num_keys() <= depth) {
      result_.numbers.push_back(entries.front().number);
      entries = entries.subspan(1);
    }
    if (entries.size() == 1) return result_.numbers.push_back(entries.front().number);
    if (entries.empty()) return;
    std::vector<Item> items = items_of(entries, depth);
    if (!entries.front().is_list_position(depth) &&
        !std::ranges::is_sorted(items, {}, &Item::dict_order)) {
      ++result_.num_reordered_dicts;
      std::ranges::stable_sort(items, {}, &Item::dict_order);
    }
    for (const Item& item : items) visit(item.entries, depth + 1);
  }

  WalkResult result() && { return std::move(result_); }

 private:
  /// An item of a dict or a list. `dict_order`: the smallest of its entries.
  struct Item {
    std::span<const Entry> entries;
    std::uint32_t dict_order;
  };

  static std::vector<Item> items_of(std::span<const Entry> entries, std::size_t depth) {
    std::vector<Item> items;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (i > 0 && compare_keys(entries[i - 1], entries[i], depth) == 0) {
        Item& item = items.back();
        item.entries = {item.entries.data(), item.entries.size() + 1};
        item.dict_order = std::min(item.dict_order, entries[i].dict_order);
      } else {
        items.push_back({entries.subspan(i, 1), entries[i].dict_order});
      }
    }
    return items;
  }

  WalkResult result_;
};

WalkResult walk_through(const CheckpointContents& contents) {
  const std::vector<Entry> entries = sorted_entries(contents);
  Walk walk(entries.size());
  if (!entries.empty()) walk.visit(entries, 0);
  return std::move(walk).result();
}

/// Takes a number from the front of `text`. Returns false if there is none.
bool take_number(std::string_view& text, std::uint32_t& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return false;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return true;
}

/// Returns the numbers of the text; nothing if one is repeated, or is not below `num_entries`, or
/// cannot be read. Numbers may be missing.
std::vector<std::uint32_t> numbers_in(std::string_view text, std::size_t num_entries) {
  std::vector<std::uint32_t> numbers;
  std::vector<bool> seen(num_entries);
  while (!text.empty()) {
    if (!numbers.empty()) {
      if (text.front() != ',') return {};
      text.remove_prefix(1);
    }
    std::uint32_t first = 0;
    if (!take_number(text, first)) return {};
    std::uint32_t last = first;
    if (text.starts_with('-')) {
      text.remove_prefix(1);
      if (!take_number(text, last)) return {};
    }
    if (last < first || last >= num_entries) return {};
    for (std::uint32_t number = first; number <= last; ++number) {
      if (seen[number]) return {};
      seen[number] = true;
      numbers.push_back(number);
    }
  }
  return numbers;
}

}  // namespace

std::vector<std::uint32_t> entries_in_dict_order(const CheckpointContents& contents) {
  return walk_through(contents).numbers;
}

std::vector<std::string> names_in_dict_order(const CheckpointContents& contents) {
  const std::size_t num_tensors = contents.tensors.size();
  std::vector<std::string> names;
  names.reserve(num_tensors + contents.aliases.size());
  for (const std::uint32_t number : walk_through(contents).numbers) {
    if (number < num_tensors) {
      names.push_back(contents.tensors[number].meta.fqn);
    } else if (number - num_tensors < contents.aliases.size()) {
      names.push_back(contents.aliases[number - num_tensors].fqn);
    }
  }
  return names;
}

std::size_t num_reordered_dicts(const CheckpointContents& contents) {
  return walk_through(contents).num_reordered_dicts;
}

std::string key_order_text(const CheckpointContents& contents) {
  const WalkResult found = walk_through(contents);
  if (found.num_reordered_dicts == 0) return {};
  std::string text;
  for (std::size_t i = 0; i < found.numbers.size();) {
    std::size_t end = i + 1;
    while (end < found.numbers.size() && found.numbers[end] == found.numbers[end - 1] + 1) ++end;
    text += (text.empty() ? "" : ",") + std::to_string(found.numbers[i]);
    if (end > i + 1) text += "-" + std::to_string(found.numbers[end - 1]);
    i = end;
  }
  return text;
}

bool set_key_order(CheckpointContents& contents, std::string_view text) {
  const std::size_t num_tensors = contents.tensors.size();
  const std::size_t num_named = num_tensors + contents.aliases.size();
  const std::size_t num_entries = num_named + contents.values.size();
  const std::vector<std::uint32_t> numbers = numbers_in(text, num_entries);
  if (numbers.size() != num_entries) return false;
  for (std::uint32_t i = 0; i < numbers.size(); ++i) {
    const std::uint32_t number = numbers[i];
    std::uint32_t& dict_order = number < num_tensors ? contents.tensors[number].dict_order
                                : number < num_named
                                    ? contents.aliases[number - num_tensors].dict_order
                                    : contents.values[number - num_named].dict_order;
    dict_order = i + 1;
  }
  return true;
}

}  // namespace tessera::formats
