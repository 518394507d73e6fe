#include "formats/per_rank.h"

#include <charconv>
#include <utility>

#include "base/size_text.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

constexpr const char* kPerRank = "per_rank";

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
  own.name = std::string(after + 1, end);
  return own;
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
