#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// One of the checkpoints to merge.
struct MergeSource {
  std::unique_ptr<CheckpointReader> reader;
  std::string prefix{};  // to put before every name, without its dot; empty: none
};

/// Which source's entry the merge takes if several sources have an entry of the same name.
enum class MergePreference {
  none,   // the first source's, but the merge reports the name in `collisions`
  first,  // the first source's
  last,   // the last source's
};

/// Several checkpoints as one.
struct MergedCheckpoint {
  std::unique_ptr<CheckpointReader> reader;
  /// Contradictions (rule `merge`), for which a move must be refused. Without a preference: equal
  /// names, different annotations. Always: `s.w` in one source, tensor or value `s` in another; a
  /// list in one source that is a dict in another.
  std::vector<Finding> collisions;
  /// How many dicts lose the order of their keys: such a dict has keys from several sources, and no
  /// source says how the keys of one source follow those of another. For
  /// PlanOptions::num_unordered_dicts.
  std::size_t num_unordered_dicts = 0;
};

/// Returns several checkpoints as one: the tensors, values, aliases and flat units of all, each
/// under its source's prefix. Pieces keep their ranks. Annotations get no prefix.
///
/// Optimizer state belongs to the parameter (TensorEntry::parameter) of its own source. If its
/// source lacks that parameter (model and optimizer saved apart), the state belongs to the
/// parameter of that name in the first source that has one. If the merge takes an alias from one
/// source and the alias's target from another, the alias becomes a tensor, so that it keeps its own
/// bytes. The format is the first source's. Requires: at least one source. Throws: Error(io).
MergedCheckpoint merge_checkpoints(std::vector<MergeSource> sources, MergePreference preference);

/// A checkpoint to open as one of several.
struct MergePath {
  std::string path;
  std::string prefix{};  // to put before every name, with or without its dot; empty: none
};

/// Opens checkpoints of any format and merges them, as `merge_checkpoints`. `fs` must outlive the
/// reader. `as_dict`: as in OpenOptions. Requires: at least one path. Throws: as open_checkpoint.
MergedCheckpoint open_merged(const FileSystem& fs, const std::vector<MergePath>& paths,
                             MergePreference preference,
                             const std::vector<std::string>& as_dict = {});

}  // namespace tessera::formats
