#include "reshard/key_path_rename.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <variant>

namespace tessera::reshard {
namespace {

using formats::Key;
using formats::KeyPath;
using formats::NonStringKey;

/// If `from` and `to` both begin with `key`, removes it from both. Returns whether they do.
bool take_common_key(const std::string& key, std::string_view& from, std::string_view& to) {
  const std::string front = key + ".";
  if (!from.starts_with(front) || !to.starts_with(front)) return false;
  from.remove_prefix(front.size());
  to.remove_prefix(front.size());
  return true;
}

bool is_integer_key(const Key& key) {
  const auto* const other = std::get_if<NonStringKey>(&key);
  if (other == nullptr) return false;
  const Value value = formats::dict_key_value(*other);
  return value.is<std::int64_t>() || value.is<Value::BigInt>();
}

/// Returns the integer that `text` spells; nothing for other spellings than Python's str(), such as
/// `007`.
std::optional<std::int64_t> parse_integer(const std::string& text) {
  std::int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  const bool is_whole = parsed.ec == std::errc() && parsed.ptr == end;
  return is_whole && std::to_string(number) == text ? std::optional(number) : std::nullopt;
}

/// Adds the key `text` to `result.path`. It replaces the keys of `path` from index
/// `result.path.size()` to `end`.
void replace_keys(const KeyPath& path, std::size_t end, const std::string& text,
                  RenamedPath& result) {
  const std::size_t begin = result.path.size();
  if (end - begin == 1 && is_integer_key(path[begin])) {
    if (const auto number = parse_integer(text)) {
      result.path.push_back(*formats::dict_key(*number));
      return;
    }
  }
  for (std::size_t i = begin; i < end; ++i) {
    if (std::holds_alternative<std::string>(path[i])) continue;
    const auto last = path.begin() + static_cast<std::ptrdiff_t>(i) + 1;
    result.text_keys.emplace_back(path.begin(), last);
  }
  result.made = begin;
  result.path.emplace_back(text);
}

/// A dict or a list of the nested state dict.
struct Container {
  struct Item;
  bool is_list = false;
  // Dicts and lists inside this one, by the text of their key.
  std::map<std::string, Item, std::less<>> items{};
};

struct Container::Item {
  Key key;
  std::unique_ptr<Container> container = std::make_unique<Container>();
};

/// The dicts and lists that key paths lead through.
class ContainerTree {
 public:
  void add(const KeyPath& path) {
    Container* at = &root_;
    for (std::size_t i = 0; i + 1 < path.size(); ++i) {
      auto& items = at->items;
      at = items.try_emplace(formats::spell({path[i]}), Container::Item{path[i]})
               .first->second.container.get();
      at->is_list = std::holds_alternative<std::int64_t>(path[i + 1]);
    }
  }

  /// Splits the key that a rename has made, if its text begins with keys that lead into an existing
  /// dict.
  void enter(RenamedPath& renamed) const {
    KeyPath& path = renamed.path;
    const auto made = path.begin() + static_cast<std::ptrdiff_t>(*renamed.made);
    const Container* at = find(std::span(path).first(*renamed.made));
    const std::string text = std::get<std::string>(*made);
    const bool is_last = made + 1 == path.end();
    std::string_view rest = text;
    KeyPath passed;
    KeyPath entered;          // the part of `passed` up to its last dict
    std::string_view inside;  // the rest of the text, which is a key of that dict
    while (at != nullptr) {
      const auto whole = at->items.find(rest);
      if (!is_last && whole != at->items.end() && !whole->second.container->is_list) {
        passed.push_back(whole->second.key);
        entered = std::move(passed);
        inside = {};
        renamed.made.reset();
        break;
      }
      at = pass(*at, renamed.kept_nbytes, rest, passed);
      if (at != nullptr && !at->is_list) {
        entered = passed;
        inside = rest;
      }
    }
    if (entered.empty()) return;
    const auto is_text = [](const Key& key) { return std::holds_alternative<std::string>(key); };
    if (!std::ranges::all_of(entered, is_text)) renamed.text_keys.clear();
    if (renamed.made) {
      *renamed.made += entered.size();
      entered.emplace_back(std::string(inside));
    }
    path.insert(path.erase(made), entered.begin(), entered.end());
  }

 private:
  const Container* find(std::span<const Key> path) const {
    const Container* at = &root_;
    for (const Key& key : path) {
      const auto item = at->items.find(formats::spell({key}));
      if (item == at->items.end()) return nullptr;
      at = item->second.container.get();
    }
    return at;
  }

  /// Finds the container in `at` whose key is the longest beginning of `rest` (`v` or `v.w` for
  /// `v.w.z`), removes the key from `rest` and adds it to `passed`. Does not split the last
  /// `kept_nbytes` bytes.
  static const Container* pass(const Container& at, std::size_t kept_nbytes, std::string_view& rest,
                               KeyPath& passed) {
    if (rest.size() <= kept_nbytes) return nullptr;
    const std::size_t last = kept_nbytes == 0 ? rest.size() : rest.size() - kept_nbytes - 1;
    for (std::size_t dot = rest.rfind('.', last); dot != std::string_view::npos && dot > 0;
         dot = rest.rfind('.', dot - 1)) {
      const auto item = at.items.find(rest.substr(0, dot));
      if (item == at.items.end()) continue;
      passed.push_back(item->second.key);
      rest.remove_prefix(dot + 1);
      return item->second.container.get();
    }
    return nullptr;
  }

  Container root_;
};

}  // namespace

RenamedPath renamed_path(const KeyPath& path, const std::string& name,
                         const std::vector<Rename>& renames) {
  const std::string new_name = renamed(name, renames);
  if (name == new_name) return {path};
  const auto rename = std::find_if(renames.begin(), renames.end(),
                                   [&](const Rename& r) { return name.starts_with(r.from); });
  if (path.empty() || path == KeyPath{name}) {
    const bool is_kept = rename->from.empty() && rename->to.ends_with('.');
    return {KeyPath{new_name}, 0, path.empty(), is_kept ? name.size() : 0};
  }
  if (formats::spell(path) != name) return {};
  std::string_view from = rename->from;
  std::string_view to = rename->to;
  RenamedPath result;
  std::size_t key = 0;
  for (; take_common_key(formats::spell({path[key]}), from, to); ++key) {
    result.path.push_back(path[key]);
  }
  std::string text = formats::spell({path[key]});
  for (; from.size() > text.size(); text = formats::spell({path[key]})) {
    from.remove_prefix(text.size() + 1);
    ++key;
  }
  const bool is_between_keys = from.empty() && (to.empty() || to.ends_with('.'));
  if (!is_between_keys) {
    replace_keys(path, key + 1, std::string(to) + text.substr(from.size()), result);
    ++key;
  } else if (!to.empty()) {
    replace_keys(path, key, std::string(to.substr(0, to.size() - 1)), result);
  }
  const auto rest = path.begin() + static_cast<std::ptrdiff_t>(key);
  result.path.insert(result.path.end(), rest, path.end());
  return result;
}

void enter_dicts(const std::vector<RenamedPath*>& paths) {
  ContainerTree tree;
  // Paths with a key that a rename has made. The number is the length of the dotted name up to and
  // including that key; the paths are sorted by it.
  std::vector<std::pair<std::size_t, RenamedPath*>> made;
  for (RenamedPath* const renamed : paths) {
    if (!renamed->made) {
      tree.add(renamed->path);
      continue;
    }
    const auto end = renamed->path.begin() + static_cast<std::ptrdiff_t>(*renamed->made) + 1;
    made.emplace_back(formats::spell(KeyPath(renamed->path.begin(), end)).size(), renamed);
  }
  for (const auto& [length, renamed] : made) {
    tree.add(KeyPath(renamed->path.begin(),
                     renamed->path.begin() + static_cast<std::ptrdiff_t>(*renamed->made) + 1));
  }
  // Shortest names first: a made key can only lead into a container with a shorter name, which is
  // then in the tree already.
  std::ranges::stable_sort(made, {}, [](const auto& each) { return each.first; });
  for (const auto& [length, renamed] : made) {
    tree.enter(*renamed);
    tree.add(renamed->path);
    if (renamed->path.size() == 1 && renamed->was_top_level) renamed->path.clear();
  }
}

}  // namespace tessera::reshard
