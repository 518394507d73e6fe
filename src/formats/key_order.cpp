#include "formats/key_order.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <set>
#include <span>
#include <utility>
#include <variant>

#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

/// An entry of the nested state dict. Refers to the contents.
struct KeyedEntry {
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
std::weak_ordering compare_keys(const KeyedEntry& a, const KeyedEntry& b, std::size_t depth) {
  if (!a.key_path->empty() && !b.key_path->empty()) {
    return (*a.key_path)[depth] <=> (*b.key_path)[depth];
  }
  if (a.key_path->empty() && b.key_path->empty()) return *a.name <=> *b.name;
  if (a.key_path->empty()) return 0 <=> compare_keys(b, a, depth);
  const auto* const text = std::get_if<std::string>(&(*a.key_path)[depth]);
  return text == nullptr ? std::weak_ordering::greater : *text <=> *b.name;
}

bool is_before(const KeyedEntry& a, const KeyedEntry& b) {
  const std::size_t num_common = std::min(a.num_keys(), b.num_keys());
  for (std::size_t depth = 0; depth < num_common; ++depth) {
    const std::weak_ordering order = compare_keys(a, b, depth);
    if (order != 0) return order < 0;
  }
  return a.num_keys() < b.num_keys();
}

/// Returns all entries, sorted by their paths.
std::vector<KeyedEntry> sorted_entries(const CheckpointContents& contents) {
  std::vector<KeyedEntry> entries;
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

/// An item of a dict or a list: its entries, and the smallest `dict_order` among them.
struct KeyedItem {
  std::span<const KeyedEntry> entries;
  std::uint32_t dict_order;
};

/// Walks through the nested dicts and lists. A subclass says in which order it visits the items of
/// a dict.
class Walk {
 public:
  explicit Walk(std::size_t num_entries) { result_.numbers.reserve(num_entries); }
  virtual ~Walk() = default;
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;

  /// Requires: all entries have the same first `depth` keys, and are sorted.
  void visit(std::span<const KeyedEntry> entries, std::size_t depth) {
    // This entry is a tensor or a value where others have a dict. Writers refuse such paths.
    while (!entries.empty() && entries.front().num_keys() <= depth) {
      result_.numbers.push_back(entries.front().number);
      entries = entries.subspan(1);
    }
    if (entries.size() == 1) return result_.numbers.push_back(entries.front().number);
    if (entries.empty()) return;
    std::vector<KeyedItem> items = items_of(entries, depth);
    if (!entries.front().is_list_position(depth) && arrange(items, depth)) {
      ++result_.num_reordered_dicts;
    }
    for (const KeyedItem& item : items) visit(item.entries, depth + 1);
  }

  WalkResult result() && { return std::move(result_); }

 private:
  /// Puts the items of a dict, which are in the order of Key, in the order of the walk. Returns
  /// whether the dict counts as reordered.
  virtual bool arrange(std::vector<KeyedItem>& items, std::size_t depth) const = 0;

  static std::vector<KeyedItem> items_of(std::span<const KeyedEntry> entries, std::size_t depth) {
    std::vector<KeyedItem> items;
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (i > 0 && compare_keys(entries[i - 1], entries[i], depth) == 0) {
        KeyedItem& item = items.back();
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

/// Walks in the order of `dict_order`. Counts the dicts whose order is not that of Key.
class OrderedWalk final : public Walk {
 public:
  using Walk::Walk;

 private:
  bool arrange(std::vector<KeyedItem>& items, std::size_t /*depth*/) const override {
    if (std::ranges::is_sorted(items, {}, &KeyedItem::dict_order)) return false;
    std::ranges::stable_sort(items, {}, &KeyedItem::dict_order);
    return true;
  }
};

/// Walks through a merge in the order that `merge_key_orders` describes. Counts the dicts that lose
/// their order.
class MergeWalk final : public Walk {
 public:
  /// `num_named`: the number of tensors and aliases, which are the first entries.
  MergeWalk(std::size_t num_named, const std::vector<std::vector<PlaceInSource>>& places,
            std::span<const std::size_t> root_depths)
      : Walk(places.size()), num_named_(num_named), places_(places), root_depths_(root_depths) {}

 private:
  /// The smallest `dict_order` of an item's entries in each source that has some.
  using Places = std::map<std::size_t, std::uint32_t>;
  struct Placed {
    KeyedItem item;
    Places places;
  };

  /// Returns the sources from which the merge takes entries of a dict. Leaves out a source whose
  /// entries are all taken from other sources.
  std::set<std::size_t> sources_of(const std::vector<KeyedItem>& items) const {
    std::set<std::size_t> sources;
    for (const KeyedItem& item : items) {
      for (const KeyedEntry& entry : item.entries)
        sources.insert(places_[entry.number].front().source);
    }
    return sources;
  }

  Places places_of(const KeyedItem& item, const std::set<std::size_t>& sources) const {
    Places found;
    for (const KeyedEntry& entry : item.entries) {
      for (const PlaceInSource& place : places_[entry.number]) {
        if (!sources.contains(place.source)) continue;
        const auto [known, is_new] = found.emplace(place.source, place.dict_order);
        if (!is_new) known->second = std::min(known->second, place.dict_order);
      }
    }
    return found;
  }

  static bool have_order_of(std::size_t source, const std::vector<Placed>& items) {
    std::uint32_t last = 0;
    for (const Placed& item : items) {
      const auto place = item.places.find(source);
      if (place == item.places.end()) continue;
      if (place->second < last) return false;
      last = place->second;
    }
    return true;
  }

  /// Whether the dict is the outermost one of all its sources. Then its keys can follow each other
  /// as the sources do. Returns false if two sources have tensors as its items: such files are
  /// parts of one state dict, and no file tells the order of parameters in it.
  bool is_outermost_dict(const std::vector<KeyedItem>& items, const std::set<std::size_t>& sources,
                         std::size_t depth) const {
    const auto has_it_inside = [&](std::size_t source) { return root_depths_[source] < depth; };
    if (std::ranges::any_of(sources, has_it_inside)) return false;
    std::set<std::size_t> with_tensors;
    for (const KeyedItem& item : items) {
      const KeyedEntry& entry = item.entries.front();
      const bool is_tensor = entry.num_keys() == depth + 1 && entry.number < num_named_;
      if (is_tensor) with_tensors.insert(places_[entry.number].front().source);
    }
    return with_tensors.size() < 2;
  }

  bool arrange(std::vector<KeyedItem>& items, std::size_t depth) const override {
    const std::set<std::size_t> sources = sources_of(items);
    std::vector<Placed> wanted;
    for (const KeyedItem& item : items) wanted.push_back({item, places_of(item, sources)});
    const auto has_all = [&](std::size_t source) {
      return std::ranges::all_of(wanted,
                                 [&](const Placed& item) { return item.places.contains(source); });
    };
    const auto whole = std::ranges::find_if(sources, has_all);
    bool is_known = true;  // how the keys follow each other
    if (whole != sources.end()) {
      std::ranges::stable_sort(wanted, {},
                               [&](const Placed& item) { return item.places.at(*whole); });
    } else {
      const auto first_place = [](const Placed& item) { return *item.places.begin(); };
      is_known = is_outermost_dict(items, sources, depth) ||
                 std::ranges::is_sorted(wanted, {}, first_place);
      std::ranges::stable_sort(wanted, {}, first_place);
    }
    const auto is_kept = [&](std::size_t source) { return have_order_of(source, wanted); };
    if (!is_known || !std::ranges::all_of(sources, is_kept)) return true;
    for (std::size_t i = 0; i < items.size(); ++i) items[i] = wanted[i].item;
    return false;
  }

  const std::size_t num_named_;
  const std::vector<std::vector<PlaceInSource>>& places_;
  std::span<const std::size_t> root_depths_;
};

WalkResult walk_through(const CheckpointContents& contents) {
  const std::vector<KeyedEntry> entries = sorted_entries(contents);
  OrderedWalk walk(entries.size());
  walk.visit(entries, 0);
  return std::move(walk).result();
}

/// Sets the `dict_order` of entry `numbers[i]` to `i + 1`.
void set_order(CheckpointContents& contents, std::span<const std::uint32_t> numbers) {
  const std::size_t num_tensors = contents.tensors.size();
  const std::size_t num_named = num_tensors + contents.aliases.size();
  for (std::uint32_t i = 0; i < numbers.size(); ++i) {
    const std::uint32_t number = numbers[i];
    std::uint32_t& dict_order = number < num_tensors ? contents.tensors[number].dict_order
                                : number < num_named
                                    ? contents.aliases[number - num_tensors].dict_order
                                    : contents.values[number - num_named].dict_order;
    dict_order = i + 1;
  }
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
  const std::size_t num_entries =
      contents.tensors.size() + contents.aliases.size() + contents.values.size();
  const std::vector<std::uint32_t> numbers = numbers_in(text, num_entries);
  if (numbers.size() != num_entries) return false;
  set_order(contents, numbers);
  return true;
}

std::size_t merge_key_orders(CheckpointContents& contents,
                             const std::vector<std::vector<PlaceInSource>>& places,
                             std::span<const std::size_t> root_depths) {
  const std::vector<KeyedEntry> entries = sorted_entries(contents);
  TESSERA_CHECK(places.size() == entries.size());
  MergeWalk walk(contents.tensors.size() + contents.aliases.size(), places, root_depths);
  walk.visit(entries, 0);
  const WalkResult found = std::move(walk).result();
  set_order(contents, found.numbers);
  return found.num_reordered_dicts;
}

}  // namespace tessera::formats
