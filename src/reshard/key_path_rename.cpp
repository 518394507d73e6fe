#include "reshard/key_path_rename.h"

#include <algorithm>
#include <string_view>

namespace tessera::reshard {
namespace {

/// If `from` and `to` both begin with `step`, removes it from both. Returns whether they do.
bool take_common_key(const std::string& step, std::string_view& from, std::string_view& to) {
  const std::string front = step + ".";
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
  auto step = path.begin();
  for (; take_common_key(formats::spell({*step}), from, to); ++step) result.push_back(*step);
  std::string text = formats::spell({*step});
  for (; from.size() > text.size(); text = formats::spell({*step})) {
    from.remove_prefix(text.size() + 1);
    ++step;
  }
  const bool is_between_keys = from.empty() && (to.empty() || to.ends_with('.'));
  if (is_between_keys) {
    if (!to.empty()) result.emplace_back(std::string(to.substr(0, to.size() - 1)));
    result.push_back(*step);
  } else {
    result.emplace_back(std::string(to) + text.substr(from.size()));
  }
  result.insert(result.end(), step + 1, path.end());
  return result;
}

}  // namespace tessera::reshard
