#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/name_rules.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::reshard {

/// The key path of a name after the renames.
struct RenamedPath {
  formats::KeyPath path{};            // empty: the name is a top-level key
  std::optional<std::size_t> made{};  // index in `path` of the key whose text a rename has made
  bool was_top_level = false;         // the path before the renames was empty
  /// Number of last bytes of the made key that are a whole key of the source; never cut further.
  std::size_t kept_nbytes = 0;
  /// Paths in the source. Each leads to a key that was not a string and became text.
  std::vector<formats::KeyPath> text_keys{};
};

/// Returns the key path that `name` has after the renames; `path` is its path before. Example: by
/// the rename `m.fc.=m.up.proj.`, the path `m`, `fc`, `weight` becomes `m`, `up.proj`, `weight`.
/// The first keys that both prefixes have stay as they are (`m`), and so do the keys after the
/// prefix (`weight`). The keys between them become one key (`up.proj`), together with the rest of
/// the key in which the prefix ends. If a key is an integer and becomes another integer, it keeps
/// its type. Returns an empty path if the keys of `path`, joined by dots, are not `name`.
RenamedPath renamed_path(const formats::KeyPath& path, const std::string& name,
                         const std::vector<Rename>& renames);

/// Moves entries into existing dicts: if a rename has made the key `v.z`, and any of the paths has
/// a dict `v`, the key becomes `z` in the dict `v`. `paths` are the paths of all entries.
void enter_dicts(const std::vector<RenamedPath*>& paths);

}  // namespace tessera::reshard
