#pragma once

namespace tessera::formats {

/// The ranks whose files a writer writes: `[begin, end)`.
struct RankSelection {
  int begin = 0;
  int end = 0;

  bool contains(int rank) const { return begin <= rank && rank < end; }
};

/// The suffix of the file of a rank part until the file is complete. It is also StagedDestination's
/// suffix: Tessera takes a file with this suffix for one that a writer left when it died.
inline constexpr const char* kUncommittedSuffix = ".partial";

}  // namespace tessera::formats
