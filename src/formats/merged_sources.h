#pragma once

#include <cstddef>
#include <optional>
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
  /// Does what the function `source_of_tensor` does.
  virtual std::optional<std::size_t> source_of_tensor(std::size_t /*tensor_index*/) const {
    return std::nullopt;
  }
};

/// Returns the sources of a merge, also if other readers show the merge under other names. Empty if
/// `reader` is of one checkpoint. The result lives as long as `reader`.
std::span<const MergeSource> sources_of_merge(const CheckpointReader& reader);

/// Returns from which source of a merge a tensor comes, as an index into `sources_of_merge`.
/// Nothing if `reader` is not the merge itself, but shows one, or is of one checkpoint.
std::optional<std::size_t> source_of_tensor(const CheckpointReader& reader,
                                            std::size_t tensor_index);

}  // namespace tessera::formats
