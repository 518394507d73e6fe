#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/journal.h"
#include "tessera/formats/native.h"
#include "tessera/formats/safetensors.h"

namespace tessera::formats {

/// How a new checkpoint is written.
struct CreateOptions {
  Format format{};                                      // of the new checkpoint
  OverwritePolicy overwrite = OverwritePolicy::refuse;  // what to do with an existing checkpoint
  NativeWriteOptions native{};                          // for native alone
  SafetensorsWriteOptions safetensors{};                // for safetensors alone
  std::optional<JournalOptions> journal{};              // none: uncommitted work is removed
};

/// Starts a checkpoint of any format. `values` is parallel to `contents.values`; `fs` must outlive
/// the writer. Throws: what the format's own `create_…` throws; Error(already_exists) and
/// Error(mismatch) for kept work (KeptWork).
std::unique_ptr<CheckpointWriter> create_checkpoint(FileSystem& fs, const std::string& destination,
                                                    CheckpointContents contents,
                                                    std::vector<Value> values,
                                                    const CreateOptions& options);

/// Throws what create_checkpoint would throw about the destination, its staging path (kept work
/// included), and the files beside them. Changes nothing.
void check_staging(FileSystem& fs, const std::string& destination,
                   const CheckpointContents& contents, const std::vector<Value>& values,
                   const CreateOptions& options);

/// Checks that a move from `source` may write to the destination. `option` names the option that
/// asks to replace.
/// Throws: Error(invalid_argument) if one is inside the other, or if something other than a
/// checkpoint would be replaced; Error(already_exists), also for a dangling link.
void check_destination(const FileSystem& fs, const std::string& source,
                       const std::string& destination, OverwritePolicy overwrite,
                       const std::string& option);

}  // namespace tessera::formats
