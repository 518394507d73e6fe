#include "reshard/key_path_rename.h"

#include <algorithm>
#include <string_view>

namespace tessera::reshard {
namespace {

/// If `from` and `to` both begin with `key`, removes it from both. Returns whether they do.
bool take_common_key(const std::string& key, std::string_view& from, std::string_view& to) {
  const std::string front = key + ".";
  if (!from.starts_with(front) || !to.starts_with(front)) return false;
  from.remove_prefix(front.size());
  to.remove_prefix(front.size());
  return true;
}

}  // namespace

formats::KeyPath renamed_path(const formats::KeyPath& path, const std::string& name,
                              const std::vector<Rename>& renames) {
  if (name == renamed(name, renames) || path.empty()) return path;
  if (formats::spell(path) != name) return {};
  const auto rename = std::find_if(renames.begin(), renames.end(),
                                   [&](const Rename& r) { return name.starts_with(r.from); });
  std::string_view from = rename->from;
  std::string_view to = rename->to;
  formats::KeyPath result;
  auto key = path.begin();
  for (; take_common_key(formats::spell({*key}), from, to); ++key) result.push_back(*key);
  std::string text = formats::spell({*key});
  for (; from.size() > text.size(); text = formats::spell({*key})) {
    from.remove_prefix(text.size() + 1);
    ++key;
  }
  const bool is_between_keys = from.empty() && (to.empty() || to.ends_with('.'));
  if (is_between_keys) {
    if (!to.empty()) result.emplace_back(std::string(to.substr(0, to.size() - 1)));
    result.push_back(*key);
  } else {
    result.emplace_back(std::string(to) + text.substr(from.size()));
  }
  result.insert(result.end(), key + 1, path.end());
  return result;
}

}  // namespace tessera::reshard
