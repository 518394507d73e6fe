#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// [Note: Entries of each rank] Where each rank has a file, and an entry that nothing cuts differs
/// between them, the lowest rank's entry keeps the name; others are `per_rank.<rank>.<name>`.

/// Returns the path of a rank's own entry, which all ranks together have at `path` or, if that is
/// empty, under `name`.
KeyPath per_rank_path(int rank, const std::string& name, const KeyPath& path);
/// An entry that one rank has of its own.
struct OwnEntry {
  int rank = 0;
  std::string name;  // of the entry that all ranks together have
};
/// Returns whose entry a name is; nothing unless it is `per_rank.<rank>.<name>`.
std::optional<OwnEntry> parse_per_rank_name(std::string_view name);
/// Returns the note that some ranks have own entries. Requires: `names`, without `per_rank.<rank>`,
/// has at least one.
Finding per_rank_note(const std::string& path, const std::set<std::string>& names);

}  // namespace tessera::formats
