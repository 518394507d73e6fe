#pragma once

namespace tessera::formats {

/// The ranks whose files a writer writes: `[begin, end)`.
struct RankSelection {
  int begin = 0;
  int end = 0;

  bool contains(int rank) const { return begin <= rank && rank < end; }
};

/// What stands behind the name of a part's file until it is complete. As StagedDestination's own,
/// so that it is known for what a dead writer left.
inline constexpr const char* kUncommittedSuffix = ".partial";

}  // namespace tessera::formats
