#include "formats/per_rank_rules.h"

#include <algorithm>
#include <utility>

#include "base/unused_patterns.h"

namespace tessera::formats {
namespace {

std::vector<std::string> spelling_per_rank(std::vector<std::string> patterns) {
  std::erase_if(patterns, [](const std::string& pattern) { return !spells_per_rank(pattern); });
  return patterns;
}

}  // namespace

bool spells_per_rank(const std::string& pattern) {
  return pattern.find("per_rank") != std::string::npos;
}

EntrySelection::EntrySelection(const NameSelection& patterns) : all_(patterns) {
  auto [wanted, exclusions] = tessera::detail::unused_patterns(patterns, {});  // all patterns
  wanted_by_whole_name_ = NameSelection(spelling_per_rank(wanted));
  exclusions_by_whole_name_ = NameSelection(spelling_per_rank(exclusions));
  wanted_ = NameSelection(std::move(wanted));
  exclusions_ = NameSelection(std::move(exclusions));
}

bool EntrySelection::selects(std::string_view name) const {
  const auto own = all_.selects_everything() ? std::nullopt : parse_per_rank_name(name);
  if (!own) return all_.selects(name);
  if (!exclusions_.selects(own->name) || !exclusions_by_whole_name_.selects(name)) return false;
  return wanted_.selects(own->name) ||
         (!wanted_by_whole_name_.selects_everything() && wanted_by_whole_name_.selects(name));
}

tessera::detail::UnusedPatterns unused_patterns(const NameSelection& selection,
                                                const std::vector<std::string_view>& names) {
  std::vector<std::string_view> own_names;
  own_names.reserve(names.size());
  for (const std::string_view name : names) own_names.push_back(name_without_rank(name));
  auto unused = tessera::detail::unused_patterns(selection, own_names);
  if (std::ranges::none_of(unused.wanted, spells_per_rank) &&
      std::ranges::none_of(unused.exclusions, spells_per_rank)) {
    return unused;
  }
  const auto unused_with_rank = tessera::detail::unused_patterns(selection, names);
  const auto erase_used = [](std::vector<std::string>& patterns,
                             const std::vector<std::string>& with_rank) {
    std::erase_if(patterns, [&](const std::string& pattern) {
      return spells_per_rank(pattern) && std::ranges::find(with_rank, pattern) == with_rank.end();
    });
  };
  erase_used(unused.wanted, unused_with_rank.wanted);
  erase_used(unused.exclusions, unused_with_rank.exclusions);
  return unused;
}

std::string name_after_renames(const std::string& name, const std::vector<Rename>& renames) {
  const auto own = own_entry_to_rename(name, renames);
  if (!own) return renamed(name, renames);
  const std::string prefix = name.substr(0, name.size() - own->name.size());
  return prefix + renamed(own->name, renames_of_own_entry(own->name, renames));
}

bool fits_entry(const Rename& rename, const std::string& name) {
  const auto own = own_entry_to_rename(name, {rename});
  if (!own) return name.starts_with(rename.from);
  return own->name.starts_with(rename.from) || rename_of_dict(own->name, rename);
}

std::optional<OwnEntry> own_entry_to_rename(const std::string& name,
                                            const std::vector<Rename>& renames) {
  for (const Rename& rename : renames) {
    const bool is_whole = rename.from.starts_with("per_rank");
    if (is_whole && name.starts_with(rename.from)) return std::nullopt;
  }
  return parse_per_rank_name(name);
}

std::vector<Rename> renames_of_own_entry(const std::string& name,
                                         const std::vector<Rename>& renames) {
  std::vector<Rename> all = renames;
  for (Rename& rename : all) {
    if (auto of_dict = rename_of_dict(name, rename)) rename = *std::move(of_dict);
  }
  return all;
}

std::optional<Rename> rename_of_dict(const std::string& name, const Rename& rename) {
  if (rename.from != name + "." || !rename.to.ends_with('.') || rename.to.size() < 2) return {};
  return Rename{name, rename.to.substr(0, rename.to.size() - 1)};
}

}  // namespace tessera::formats
