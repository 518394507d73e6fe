#include "tessera/reshard/planner.h"

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/name_rules.h"

namespace tessera::reshard {
namespace {

/// Returns whether `fits` is true for the name of any tensor, value or alias.
template <class Fits>
bool has_name(const formats::CheckpointContents& contents, const Fits& fits) {
  return std::ranges::any_of(contents.tensors, fits,
                             [](const auto& tensor) { return tensor.meta.fqn; }) ||
         std::ranges::any_of(contents.values, fits, &formats::ValueEntry::name) ||
         std::ranges::any_of(contents.aliases, fits, &formats::Alias::fqn);
}

}  // namespace

NamePrefixes::NamePrefixes(std::vector<std::string> prefixes) : prefixes_(std::move(prefixes)) {
  for (std::string& prefix : prefixes_) {
    if (!prefix.ends_with('.')) prefix += '.';
  }
}

std::vector<std::string> NamePrefixes::patterns() const {
  std::vector<std::string> patterns;
  for (const std::string& prefix : prefixes_) patterns.push_back(glob_of(prefix) + "*");
  return patterns;
}

std::vector<Rename> NamePrefixes::removals() const {
  std::vector<Rename> removals;
  for (const std::string& prefix : prefixes_) removals.push_back({prefix, ""});
  return removals;
}

void NamePrefixes::check_used(const formats::CheckpointContents& contents,
                              std::string_view option) const {
  for (const std::string& prefix : prefixes_) {
    if (has_name(contents, [&](std::string_view name) { return name.starts_with(prefix); })) {
      continue;
    }
    const std::string whole = prefix.substr(0, prefix.size() - 1);
    if (has_name(contents, [&](std::string_view name) { return name == whole; })) {
      throw Error::expected(ErrorKind::invalid_argument, {}, option, "a prefix of names",
                            "'" + printable(whole) + "', a whole name",
                            "select a whole name with a pattern");
    }
    throw Error::expected(ErrorKind::invalid_argument, {}, option, "a prefix of a name",
                          "'" + printable(prefix) + "'");
  }
}

}  // namespace tessera::reshard
