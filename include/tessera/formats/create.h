#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/native.h"
#include "tessera/formats/safetensors.h"

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

/// How a new checkpoint is written.
struct CreateOptions {
  Format format{};  // of the new checkpoint
  OverwritePolicy overwrite =
      OverwritePolicy::refuse;              // what becomes of a checkpoint that is there
  NativeWriteOptions native{};              // for native alone
  SafetensorsWriteOptions safetensors{};    // for safetensors alone
  std::optional<JournalOptions> journal{};  // none: what is not committed is lost
};

/// Starts a checkpoint of any format. `values` is parallel to `contents.values`; `fs` must outlive
/// the writer. Throws: what the format's own `create_…` throws; Error(already_exists) and
/// Error(mismatch) on work that is kept (KeptWork).
std::unique_ptr<CheckpointWriter> create_checkpoint(FileSystem& fs, const std::string& destination,
                                                    CheckpointContents contents,
                                                    std::vector<Value> values,
                                                    const CreateOptions& options);

/// Throws what create_checkpoint would throw about the destination and about what lies at its
/// staging path, work that is kept among it, or beside it. Changes nothing.
void check_staging(FileSystem& fs, const std::string& destination,
                   const CheckpointContents& contents, const std::vector<Value>& values,
                   const CreateOptions& options);

/// Passes a destination that a move from `source` may write to. `option` is what asks to replace.
/// Throws: Error(invalid_argument) where one lies within the other, or where what is no checkpoint
/// would be replaced; Error(already_exists), also on a link that leads nowhere.
void check_destination(const FileSystem& fs, const std::string& source,
                       const std::string& destination, OverwritePolicy overwrite,
                       const std::string& option);

/// Returns the path of what a writer that is done has replaced and could not remove: what stands at
/// its staging path, or the values beside a single safetensors file. Nothing where there is none.
/// Requires: the checkpoint at `destination` has replaced another one.
std::optional<std::string> left_over_at(const FileSystem& fs, const std::string& destination);

}  // namespace tessera::formats
