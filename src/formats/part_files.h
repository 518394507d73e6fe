#pragma once

namespace tessera::formats {

/// The ranks whose files a writer writes: `[begin, end)`.
struct RankSelection {
  int begin = 0;
  int end = 0;

  bool contains(int rank) const { return begin <= rank && rank < end; }
};

/// The suffix of a part's file until the file is complete. It is also StagedDestination's suffix,
/// so a file with this suffix is recognized as left by a writer that died.
inline constexpr const char* kUncommittedSuffix = ".partial";

}  // namespace tessera::formats
