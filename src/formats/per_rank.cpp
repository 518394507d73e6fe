#include "formats/per_rank.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/size_text.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

constexpr const char* kPerRank = "per_rank";

/// Returns whether `name`, or a name that begins with it and a dot, is in `names`.
bool has_at_or_below(const std::set<std::string>& names, const std::string& name) {
  if (names.contains(name)) return true;
  const std::string prefix = name + ".";
  const auto next = names.lower_bound(prefix);
  return next != names.end() && next->starts_with(prefix);
}

/// Cuts `name` at its last dot, again and again, until it is one of `names`, or a dict or list
/// around one of them. Returns an empty text if there is no such prefix.
std::string longest_prefix_in(const std::set<std::string>& names, std::string name) {
  while (!has_at_or_below(names, name)) {
    const std::size_t dot = name.rfind('.');
    if (dot == std::string::npos) return {};
    name.resize(dot);
  }
  return name;
}

}  // namespace

KeyPath per_rank_path(int rank, const std::string& name, const KeyPath& path) {
  KeyPath result{std::string(kPerRank), std::to_string(rank)};
  if (path.empty()) {
    result.emplace_back(name);
  } else {
    result.insert(result.end(), path.begin(), path.end());
  }
  return result;
}

std::optional<OwnEntry> parse_per_rank_name(std::string_view name) {
  const std::string prefix = std::string(kPerRank) + ".";
  if (!name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  OwnEntry own;
  const char* const end = name.data() + name.size();
  const auto [after, error] = std::from_chars(name.data(), end, own.rank);
  if (error != std::errc{} || own.rank < 0 || after == end || *after != '.') return std::nullopt;
  // Another spelling, such as `01`, is a key of the user: a rank's own entry would lose it.
  if (std::string(name.data(), after) != std::to_string(own.rank)) return std::nullopt;
  own.name = std::string(after + 1, end);
  return own;
}

std::string_view name_without_rank(std::string_view name) {
  const auto own = parse_per_rank_name(name);
  return own ? name.substr(name.size() - own->name.size()) : name;
}

std::set<std::string> find_own_entries_apart(const CheckpointContents& contents) {
  const auto is_own = [](const std::string& name) { return parse_per_rank_name(name).has_value(); };
  const bool has_own_tensors = std::ranges::any_of(
      contents.tensors, [&](const TensorEntry& tensor) { return is_own(tensor.meta.fqn); });
  if (!has_own_tensors && std::ranges::none_of(contents.values, is_own, &ValueEntry::name)) {
    return {};
  }
  std::set<std::string> tensors;  // shared ones
  std::set<std::string> values;
  std::set<std::string> all;
  struct Named {
    std::string fqn;
    OwnEntry own;
    const std::set<std::string>* shared;  // of the same kind
  };
  std::vector<Named> own_entries;
  const auto add = [&](const std::string& name, std::set<std::string>& shared) {
    if (auto own = parse_per_rank_name(name)) {
      own_entries.push_back({name, *std::move(own), &shared});
    } else {
      shared.insert(name);
      all.insert(name);
    }
  };
  for (const TensorEntry& tensor : contents.tensors) add(tensor.meta.fqn, tensors);
  for (const ValueEntry& value : contents.values) add(value.name, values);
  for (const Alias& alias : contents.aliases) {
    if (!parse_per_rank_name(alias.fqn)) all.insert(alias.fqn);
  }
  std::map<int, std::set<std::string>> containers;  // by rank: dicts and lists with other keys
  for (const auto& [fqn, own, shared] : own_entries) {
    if (!shared->contains(own.name)) containers[own.rank].insert(longest_prefix_in(all, own.name));
  }
  std::set<std::string> apart;
  for (const auto& [fqn, own, shared] : own_entries) {
    const auto is_around = [&name = own.name](const std::string& container) {
      return !container.empty() && (name == container || name.starts_with(container + "."));
    };
    const bool is_inside = std::ranges::any_of(containers[own.rank], is_around);
    if (is_inside || !shared->contains(own.name)) apart.insert(fqn);
  }
  return apart;
}

Finding per_rank_note(const std::string& path, const std::set<std::string>& names) {
  TESSERA_CHECK(!names.empty());
  return {.severity = Finding::Severity::note,
          .rule = "ranks",
          .where = {.path = path},
          .expected = "equal copies of unsharded entries on all ranks",
          .found = counted(names.size(), "name") + " with different copies, such as '" +
                   printable(*names.begin()) +
                   "' (the copy of the lowest rank keeps the name, other copies are " + kPerRank +
                   ".<rank>.<name>)"};
}

}  // namespace tessera::formats
