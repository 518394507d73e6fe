#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// [Note: Entries of each rank] Ranks may have different contents for an entry that is not sharded,
/// such as the state of a random generator. Then the entry of the lowest rank keeps its name, and
/// the entry of any other rank becomes `per_rank.<rank>.<name>`.

/// Returns the key path of the entry `per_rank.<rank>.<name>`: the keys `per_rank` and `<rank>`,
/// then those of `path`, or only `name` if `path` is empty.
KeyPath per_rank_path(int rank, const std::string& name, const KeyPath& path);
/// The parts of a name `per_rank.<rank>.<name>`.
struct OwnEntry {
  int rank = 0;
  std::string name;  // without `per_rank.<rank>.`
};
/// Returns the rank and the name in `per_rank.<rank>.<name>`; nothing for any other name.
std::optional<OwnEntry> parse_per_rank_name(std::string_view name);
/// Returns `<name>` of `per_rank.<rank>.<name>`, and any other name as it is. A view of `name`.
std::string_view name_without_rank(std::string_view name);
/// Returns the entries `per_rank.<rank>.<name>` that cannot replace the shared entry `<name>` on
/// that rank: their dict or list has other keys than the shared one, so the result would mix both.
/// Also those without a shared entry, or with one of another kind (a value, not a tensor).
std::set<std::string> find_own_entries_apart(const CheckpointContents& contents);
/// Returns a note that the entries `names` differ between ranks. The names are without
/// `per_rank.<rank>.`; there must be at least one.
Finding per_rank_note(const std::string& path, const std::set<std::string>& names);

}  // namespace tessera::formats
