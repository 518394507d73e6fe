#include "formats/name_pattern.h"

#include <algorithm>
#include <vector>

#include "tessera/base/name_rules.h"

namespace tessera::formats {
namespace {

/// Says whether a list that is sorted by name has a name that begins with `prefix`.
template <class Entry, class NameOf>
bool any_begins_with(const std::vector<Entry>& entries, std::string_view prefix, NameOf name_of) {
  const auto entry = std::ranges::lower_bound(entries, prefix, {}, name_of);
  return entry != entries.end() && name_of(*entry).starts_with(prefix);
}

}  // namespace

std::string pattern_of(const CheckpointContents& contents, std::string_view name) {
  const std::string prefix = std::string(name) + '.';
  const auto name_of_tensor = [](const TensorEntry& entry) {
    return std::string_view(entry.meta.fqn);
  };
  const auto name_of_value = [](const ValueEntry& entry) { return std::string_view(entry.name); };
  const auto name_of_alias = [](const Alias& alias) { return std::string_view(alias.fqn); };
  const bool has_names_below = any_begins_with(contents.tensors, prefix, name_of_tensor) ||
                               any_begins_with(contents.values, prefix, name_of_value) ||
                               any_begins_with(contents.aliases, prefix, name_of_alias);
  return (has_names_below ? "=" : "") + glob_of(name);
}

}  // namespace tessera::formats
