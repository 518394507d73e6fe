#include "recipe/wrappers.h"

#include <algorithm>

namespace tessera::recipe {

std::string Wrappers::removed_from(std::string_view name) const {
  std::string result = stripped(name);
  return result.empty() && !name.ends_with('.') ? std::string(name) : result;
}

std::string Wrappers::stripped(std::string_view name) const {
  if (empty()) return std::string(name);
  std::string result;
  for (std::size_t begin = 0; begin < name.size();) {
    const std::size_t end = std::min(name.find('.', begin), name.size());
    const std::string_view component = name.substr(begin, end - begin);
    if (std::ranges::find(components_, component) == components_.end()) {
      result += name.substr(begin, end - begin + 1);
    }
    begin = end + 1;
  }
  // If the last component was a wrapper, removes the dot before it.
  if (!name.ends_with('.') && result.ends_with('.')) result.pop_back();
  return result;
}

formats::KeyPath Wrappers::removed_from(const formats::KeyPath& path,
                                        const std::string& name) const {
  formats::KeyPath result;
  for (const formats::Key& key : path) {
    const auto* text = std::get_if<std::string>(&key);
    if (text == nullptr) {
      result.push_back(key);
      continue;
    }
    std::string bare = stripped(*text);
    if (!bare.empty() || text->empty()) result.emplace_back(std::move(bare));
  }
  return !result.empty() && formats::spell(result) == name ? result : formats::KeyPath();
}

}  // namespace tessera::recipe
