#include "formats/per_rank_rules.h"

#include "base/unused_patterns.h"

namespace tessera::formats {
namespace {

bool excludes_any(const NameSelection& selection, const std::vector<std::string_view>& names) {
  const auto count_unused = [&](const std::vector<std::string_view>& among) {
    return tessera::detail::unused_patterns(selection, among).exclusions.size();
  };
  return count_unused(names) < count_unused({});
}

}  // namespace

bool selects_entry(const NameSelection& selection, std::string_view name) {
  const auto own = parse_per_rank_name(name);
  if (!own) return selection.selects(name);
  return (selection.selects(name) || selection.selects(own->name)) &&
         !excludes_any(selection, {name, own->name});
}

void add_names_without_rank(std::vector<std::string_view>& names) {
  const std::size_t num_names = names.size();
  for (std::size_t i = 0; i < num_names; ++i) {
    const std::string_view shared = name_without_rank(names[i]);
    if (shared.size() != names[i].size()) names.push_back(shared);
  }
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
