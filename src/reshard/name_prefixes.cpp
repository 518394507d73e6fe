#include "tessera/reshard/planner.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "formats/per_rank.h"
#include "tessera/base/error.h"
#include "tessera/base/name_rules.h"

namespace tessera::reshard {
namespace {

/// Returns the first name of a tensor, value or alias for which `fits` is true.
template <class Fits>
std::optional<std::string> find_name(const formats::CheckpointContents& contents,
                                     const Fits& fits) {
  const auto name_of_tensor = [](const formats::TensorEntry& tensor) -> const std::string& {
    return tensor.meta.fqn;
  };
  const auto tensor = std::ranges::find_if(contents.tensors, fits, name_of_tensor);
  if (tensor != contents.tensors.end()) return tensor->meta.fqn;
  const auto value = std::ranges::find_if(contents.values, fits, &formats::ValueEntry::name);
  if (value != contents.values.end()) return value->name;
  const auto alias = std::ranges::find_if(contents.aliases, fits, &formats::Alias::fqn);
  if (alias != contents.aliases.end()) return alias->fqn;
  return std::nullopt;
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
    const std::string whole = prefix.substr(0, prefix.size() - 1);
    if (find_name(contents, [&](std::string_view name) { return name.starts_with(prefix); })) {
      const auto of_rank = find_name(contents, [&](std::string_view name) {
        const auto own = formats::parse_per_rank_name(name);
        return own && own->name == whole;
      });
      if (!of_rank) continue;
      throw Error::expected(ErrorKind::invalid_argument, {}, option,
                            "names under '" + printable(prefix) + "' on all ranks",
                            "'" + printable(*of_rank) + "', one entry of a rank in their place",
                            "use the pattern '" + printable(whole) + "' and a rename of '" +
                                printable(prefix) + "' instead");
    }
    if (find_name(contents, [&](std::string_view name) { return name == whole; })) {
      throw Error::expected(ErrorKind::invalid_argument, {}, option, "a prefix of names",
                            "'" + printable(whole) + "', a whole name",
                            "select a whole name with a pattern");
    }
    throw Error::expected(ErrorKind::invalid_argument, {}, option, "a prefix of a name",
                          "'" + printable(prefix) + "'");
  }
}

}  // namespace tessera::reshard
