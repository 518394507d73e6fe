#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// One of the checkpoints that are shown as one.
struct MergeSource {
  std::unique_ptr<CheckpointReader> reader;
  std::string prefix{};  // a step before every name, without its dot; empty: none
};

/// Whose entry is shown where several sources have one of that name.
enum class MergePreference {
  none,  // the first one's; and the name is a collision
  first,
  last,
};

/// Several checkpoints as one.
struct MergedCheckpoint {
  std::unique_ptr<CheckpointReader> reader;
  std::vector<Finding> collisions;  // rule `merge`, by name; none where there is a preference
};

/// Returns several checkpoints as one: the tensors, values, aliases and flat units of all, each
/// under its source's prefix, with pieces on the ranks that hold them; annotations without prefix.
///
/// Optimizer state belongs to the parameter that its source says; where that lies in another source
/// (model and optimizer saved apart), to the first source's that has one of that name. An alias
/// whose tensor is taken from elsewhere becomes a tensor itself, so that every name keeps its
/// bytes. The format is that of the first source. Requires: at least one source.
MergedCheckpoint merge_checkpoints(std::vector<MergeSource> sources, MergePreference preference);

/// A checkpoint to be opened as one of several.
struct MergePath {
  std::string path;
  std::string prefix{};  // a step before every name, with or without its dot; empty: none
};

/// Opens checkpoints of any format and returns them as one. `fs` must outlive the reader. Requires:
/// at least one path. Throws: as open_checkpoint.
MergedCheckpoint open_merged(const FileSystem& fs, const std::vector<MergePath>& paths,
                             MergePreference preference);

}  // namespace tessera::formats
