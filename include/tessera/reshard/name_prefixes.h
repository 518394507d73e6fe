#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Prefixes of names, by whole steps: `encoder`, with or without a last dot, is that of all names
/// which begin with `encoder.`. They name a part of a checkpoint, for PlanOptions.
class NamePrefixes {
 public:
  NamePrefixes() = default;
  explicit NamePrefixes(std::vector<std::string> prefixes);

  bool empty() const { return prefixes_.empty(); }

  /// Returns patterns for a NameSelection: what lies under the prefixes.
  std::vector<std::string> patterns() const;
  /// Returns what takes the prefixes off the names.
  std::vector<Rename> removals() const;

  /// Throws Error(invalid_argument) naming `option` where no name has a prefix: that is more likely
  /// a slip than a wish.
  void check_used(const formats::CheckpointContents& contents, std::string_view option) const;

 private:
  std::vector<std::string> prefixes_;  // each with its last dot
};

}  // namespace tessera::reshard
