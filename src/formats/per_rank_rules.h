#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/unused_patterns.h"
#include "formats/per_rank.h"
#include "tessera/base/name_rules.h"

// How patterns and renames, which users write for `<name>`, apply to `per_rank.<rank>.<name>`.
// See [Note: Entries of each rank].
namespace tessera::formats {

/// The entries that patterns select. A pattern for `<name>`, with `!` or without, is also one for
/// `per_rank.<rank>.<name>`. Only patterns that spell `per_rank` fit this whole name. Otherwise
/// `!p*` would take `per_rank.1.x` away from `x`. Make it once for many entries.
class EntrySelection {
 public:
  explicit EntrySelection(const NameSelection& patterns);
  bool selects(std::string_view name) const;

 private:
  NameSelection all_;
  NameSelection wanted_;                    // the patterns without `!`
  NameSelection exclusions_;                // the patterns with `!`
  NameSelection wanted_by_whole_name_;      // those of `wanted_` that spell `per_rank`
  NameSelection exclusions_by_whole_name_;  // those of `exclusions_` that spell `per_rank`
};

/// Whether a pattern spells `per_rank`.
bool spells_per_rank(const std::string& pattern);

/// Returns the patterns of `selection` that fit none of the entries `names`, by the rule of
/// EntrySelection.
tessera::detail::UnusedPatterns unused_patterns(const NameSelection& selection,
                                                const std::vector<std::string_view>& names);

/// Returns a name after the renames. They apply to `<name>` in `per_rank.<rank>.<name>`, unless a
/// rename begins with `per_rank` and replaces its first words.
std::string name_after_renames(const std::string& name, const std::vector<Rename>& renames);
/// Returns whether a rename applies to an entry, by the rule of `name_after_renames`.
bool fits_entry(const Rename& rename, const std::string& name);

/// Splits a name `per_rank.<rank>.<name>`, so that renames apply to `<name>`. Returns nothing for
/// any other name, and for a name whose first characters (`per_rank…`) a rename replaces.
std::optional<OwnEntry> own_entry_to_rename(const std::string& name,
                                            const std::vector<Rename>& renames);
/// Returns the renames that apply to `<name>` in `per_rank.<rank>.<name>`. On that rank, the entry
/// may be one value in the place of a dict that other ranks have; then it follows the rename of the
/// dict.
std::vector<Rename> renames_of_own_entry(const std::string& name,
                                         const std::vector<Rename>& renames);
/// Returns `rename` for the whole dict that it moves: for the name `m`, the rename `m.=n.` becomes
/// `m=n`. Returns nothing if `rename` fits only a part of that dict, or removes its name.
std::optional<Rename> rename_of_dict(const std::string& name, const Rename& rename);

}  // namespace tessera::formats
