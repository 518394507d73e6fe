#pragma once

#include <map>
#include <string>

namespace tessera::formats {

/// Describes work, as names and texts, so that only the same work is gone on with: whatever changes
/// a byte of a block changes one of them.
/// Members whose name begins with `kPlanExplanation` say in words what a plan was made of: they are
/// held against each other only where a digest differs, to name what differs.
using WorkIdentity = std::map<std::string, std::string>;
inline constexpr const char* kPlanDigest = "plan";
inline constexpr const char* kValuesDigest = "values";
inline constexpr const char* kPlanExplanation = "plan, ";

/// What to do about work that an earlier run has kept at the destination's staging path.
enum class KeptWork {
  refuse,   // Error(already_exists)
  resume,   // go on with it; Error(mismatch) where it is other work
  discard,  // remove it and start from the beginning
};

/// Makes a writer write down which blocks it has finished, in a journal beside its staging path,
/// so that a later writer need not be handed them again. Work in which no block is finished is not
/// kept. The file: docs/formats/journal.md.
struct JournalOptions {
  WorkIdentity identity{};                // what makes two runs the same work
  KeptWork kept_work = KeptWork::refuse;  // of an earlier run
};

}  // namespace tessera::formats
