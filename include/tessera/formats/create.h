#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/native.h"
#include "tessera/formats/safetensors.h"

namespace tessera::formats {

/// What must be equal for a run to resume the work of an interrupted run: texts by name. Every
/// option or source that would change a written byte changes a text. Entries whose name starts with
/// `kPlanExplanation` describe the plan in words. If the digests of two plans differ, these entries
/// show which option differs.
using ResumeIdentity = std::map<std::string, std::string>;
inline constexpr const char* kPlanDigest = "plan";
inline constexpr const char* kValuesDigest = "values";
inline constexpr const char* kPlanExplanation = "plan, ";

/// What to do with the work that an interrupted run kept at the destination's staging path
/// (`DST.partial`).
enum class KeptWork {
  refuse,   // throw Error(already_exists)
  resume,   // continue it; throw Error(mismatch) if its identity differs
  discard,  // remove it and start again
};

/// How a writer uses a journal. The journal is a file beside the staging path that lists finished
/// blocks, so that a later writer can skip them. If an interrupted run has finished no block, the
/// next run removes its work.
/// Format of the file: docs/formats/journal.md.
struct JournalOptions {
  ResumeIdentity identity{};              // must equal the kept work's identity
  KeptWork kept_work = KeptWork::refuse;  // of an earlier run
};

/// A file in a checkpoint's folder that is no part of the checkpoint (an extra file), such as
/// `config.json`. A writer copies it into the directory of the new checkpoint.
struct ExtraFile {
  std::string path;                   // of the file to copy
  std::string name;                   // in the new directory
  std::uint64_t nbytes = 0;           // of the copy
  std::string state{};                // its size and time when it was listed; empty: not checked
  std::optional<std::string> text{};  // bytes to write instead of the file's
};

/// The mesh of ranks that DTensors name. PyTorch copies a DTensor into a parameter only if both
/// have the same mesh, so give the mesh of the trainer that will load the checkpoint.
struct DeviceMeshOptions {
  std::string device_type = "cuda";            // as in `init_device_mesh`
  std::vector<std::string> dim_names{"fsdp"};  // empty: the mesh has no names

  /// Parses `cuda:fsdp`, `cuda:ddp,fsdp` or `cpu`. Throws: Error(invalid_argument).
  static DeviceMeshOptions parse(std::string_view text);
  friend bool operator==(const DeviceMeshOptions&, const DeviceMeshOptions&) = default;
};

/// How a new checkpoint is written.
struct CreateOptions {
  Format format{};                                      // of the new checkpoint
  OverwritePolicy overwrite = OverwritePolicy::refuse;  // what to do with an existing checkpoint
  NativeWriteOptions native{};                          // for native only
  SafetensorsWriteOptions safetensors{};                // for safetensors only
  DeviceMeshOptions device_mesh{};                      // for one file per rank only
  std::optional<JournalOptions> journal{};              // empty: removes uncommitted work
  std::vector<ExtraFile> extra_files{};                 // to copy; for directories only
};

/// Starts a checkpoint of any format. `values` is parallel to `contents.values`; `fs` must outlive
/// the writer. Throws: what the format's own `create_…` throws; Error(already_exists) and
/// Error(mismatch) for kept work (KeptWork); Error(unsupported) if Tessera only reads the format.
std::unique_ptr<CheckpointWriter> create_checkpoint(FileSystem& fs, const std::string& destination,
                                                    CheckpointContents contents,
                                                    std::vector<Value> values,
                                                    const CreateOptions& options);

/// Throws what create_checkpoint would throw about the destination, its staging path (kept work
/// included), and the files beside them. Changes nothing.
void check_staging(FileSystem& fs, const std::string& destination,
                   const CheckpointContents& contents, const std::vector<Value>& values,
                   const CreateOptions& options);

/// Checks that a move from `source` may write to the destination. `option`: the name of the option
/// that allows replacing, for messages. A directory that is replaced may hold files with the names
/// in `extra_files`, but only if the new checkpoint gets the same bytes, so that nothing is lost.
/// Throws: Error(invalid_argument) if one path is inside the other, if `source` is in
/// `DST.partial`, or if something other than a checkpoint would be replaced; Error(already_exists)
/// if something exists and `overwrite` is `refuse`, or if the destination is a broken link.
void check_destination(const FileSystem& fs, const std::string& source,
                       const std::string& destination, OverwritePolicy overwrite,
                       const std::string& option, const std::vector<ExtraFile>& extra_files = {});

/// Returns what is left of a replaced checkpoint because the writer of the new one failed to remove
/// it: the staging path, or the values file beside a single safetensors file. Returns nothing if
/// the writer removed everything.
/// Requires: the checkpoint at `destination` has replaced another one.
std::optional<std::string> left_over_at(const FileSystem& fs, const std::string& destination);

}  // namespace tessera::formats
