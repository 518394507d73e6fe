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
  std::string prefix{};  // goes before every name, without the dot; empty: none
};

/// Which entry is shown if several sources have an entry of the same name.
enum class MergePreference {
  none,  // the first source's; the name is listed in `collisions`
  first,
  last,
};

/// Several checkpoints as one.
struct MergedCheckpoint {
  std::unique_ptr<CheckpointReader> reader;
  /// Contradictions (rule `merge`). Without a preference: equal names, and different annotations.
  /// In any case: an entry inside a tensor or value of another source (`s.w` inside `s`).
  std::vector<Finding> collisions;
  /// How many dicts lose the order of their keys: the keys of such a dict come from several
  /// sources, and no source says how the keys of one source follow those of another. For
  /// PlanOptions::num_unordered_dicts.
  std::size_t num_unordered_dicts = 0;
};

/// Returns several checkpoints as one: the tensors, values, aliases and flat units of all, each
/// under its source's prefix. Pieces keep their ranks. Annotations get no prefix.
///
/// Optimizer state belongs to the parameter (TensorEntry::parameter) of its own source. If that is
/// missing (model and optimizer saved apart), the state belongs to the parameter of that name in
/// the first source that has one. An alias of a tensor that comes from another source becomes a
/// tensor, so that every name keeps its bytes. The format is the first source's. `preference`:
/// which source wins if several have a name. Requires: at least one source. Throws: Error(io).
MergedCheckpoint merge_checkpoints(std::vector<MergeSource> sources, MergePreference preference);

/// A checkpoint to open as one of several.
struct MergePath {
  std::string path;
  std::string prefix{};  // goes before every name, with or without the dot; empty: none
};

/// Opens checkpoints of any format and returns them as one. `fs` must outlive the reader.
/// `as_dict`: as OpenOptions::as_dict. Requires: at least one path. Throws: as open_checkpoint.
MergedCheckpoint open_merged(const FileSystem& fs, const std::vector<MergePath>& paths,
                             MergePreference preference,
                             const std::vector<std::string>& as_dict = {});

}  // namespace tessera::formats
