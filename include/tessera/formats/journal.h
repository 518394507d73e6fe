#pragma once

#include <map>
#include <string>

namespace tessera::formats {

/// Describes work as names and texts. Anything that changes a byte of a block changes one of the
/// texts, so only the same work is resumed. Members whose name starts with `kPlanExplanation`
/// describe a plan in words. They are compared only if a digest differs, to name the difference.
using WorkIdentity = std::map<std::string, std::string>;
inline constexpr const char* kPlanDigest = "plan";
inline constexpr const char* kValuesDigest = "values";
inline constexpr const char* kPlanExplanation = "plan, ";

/// What to do with the work that an interrupted run kept at the destination's staging path.
enum class KeptWork {
  refuse,   // Error(already_exists)
  resume,   // Error(mismatch) if it is other work
  discard,  // remove it and start again
};

/// Makes a writer record the blocks it has finished in a journal beside its staging path, so that a
/// later writer can skip them. Work without a finished block is not kept. The file:
/// docs/formats/journal.md.
struct JournalOptions {
  WorkIdentity identity{};                // what makes two runs the same work
  KeptWork kept_work = KeptWork::refuse;  // of an earlier run
};

}  // namespace tessera::formats
