#pragma once

#include <span>

#include "tessera/formats/checkpoint.h"
#include "tessera/formats/merge.h"

namespace tessera::formats {

/// Interface of a reader that knows of which checkpoints it is made. Call `sources_of_merge`.
class MergedSources {
 public:
  virtual ~MergedSources() = default;
  /// Does what the function `sources_of_merge` does.
  virtual std::span<const MergeSource> merged_sources() const = 0;
};

/// Returns the sources of a merge, also if other readers show the merge under other names. Empty if
/// `reader` is of one checkpoint. The result lives as long as `reader`.
std::span<const MergeSource> sources_of_merge(const CheckpointReader& reader);

}  // namespace tessera::formats
