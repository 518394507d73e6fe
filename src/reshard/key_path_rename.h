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
  bool was_top_level = false;         // its path before was empty
  /// Paths in the source: one for each key that is not a string and became text.
  std::vector<formats::KeyPath> text_keys{};
};

/// Returns the key path that `name` has after the renames; `path` is its path before. Keys that
/// both prefixes of a rename begin with stay as they are, and so do the keys after the prefix. The
/// keys between them become one key, together with the rest of the key in which the prefix ends: by
/// the rename `m.fc.=m.up.proj.`, the path `m`, `fc`, `weight` becomes `m`, `up.proj`, `weight`. A
/// number that becomes another number in its dict stays a number. Returns an empty path if `path`
/// does not spell `name`.
RenamedPath renamed_path(const formats::KeyPath& path, const std::string& name,
                         const std::vector<Rename>& renames);

/// Moves entries into the dicts that their new names begin with: the key `v.z` becomes the key `z`
/// of the dict `v` if any of the paths has a dict `v`. `paths` are the paths of all entries.
void enter_dicts(const std::vector<RenamedPath*>& paths);

}  // namespace tessera::reshard
