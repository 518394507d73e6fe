#pragma once

namespace tessera::formats {

/// The ranks whose files a writer writes: `[begin, end)`.
struct RankSelection {
  int begin = 0;
  int end = 0;

  bool contains(int rank) const { return begin <= rank && rank < end; }
};

/// The suffix of a part's file until it is complete. It is StagedDestination's suffix, so that such
/// a file is recognized as left by a dead writer.
inline constexpr const char* kUncommittedSuffix = ".partial";

}  // namespace tessera::formats
