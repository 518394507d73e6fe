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

/// Texts by name, which must all be equal for a run to resume the work of an interrupted run: every
/// option or source that would change a written byte changes a text. Entries whose names start with
/// `kPlanExplanation` describe the plan in words. If the plans' digests differ, these entries show
/// which option differs.
using ResumeIdentity = std::map<std::string, std::string>;
inline constexpr const char* kPlanDigest = "plan";         // name of the digest of the plan
inline constexpr const char* kValuesDigest = "values";     // name of the digest of all values
inline constexpr const char* kPlanExplanation = "plan, ";  // how their names start

/// What a writer does with kept work: the finished blocks that an interrupted run left at the
/// destination's staging path (`DST.partial`). Without kept work, it starts from nothing.
enum class KeptWork {
  refuse,   // throw Error(already_exists)
  resume,   // continue it; throw Error(mismatch) if its identity differs
  discard,  // remove it and start again
};

/// How a writer uses a journal: a file beside the staging path that lists the finished blocks, so
/// that a later writer can skip them. If an interrupted run has finished no block, the next run
/// removes what it left and starts again.
/// Format of the file: docs/formats/journal.md.
struct JournalOptions {
  ResumeIdentity identity{};              // of this run; to resume, must equal the kept work's
  KeptWork kept_work = KeptWork::refuse;  // what to do with the work of an earlier run
};

/// A file in a checkpoint's folder that is no part of the checkpoint (an extra file), such as
/// `config.json`. A writer copies it into the directory of the new checkpoint.
struct ExtraFile {
  std::string path;                   // of the file to copy
  std::string name;                   // in the new directory
  std::uint64_t nbytes = 0;           // of the copy
  std::string state{};                // size and time when listed; changed: error; empty: no check
  std::optional<std::string> text{};  // bytes to write in place of the file's bytes
};

/// The device mesh that DTensors in the new files name. PyTorch copies a DTensor into a parameter
/// only if both have the same mesh, so give the mesh of the trainer that will load the checkpoint.
struct DeviceMeshOptions {
  std::string device_type = "cuda";            // as in `init_device_mesh`
  std::vector<std::string> dim_names{"fsdp"};  // empty: the dimensions have no names

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
  DeviceMeshOptions device_mesh{};                      // for the format `rank_files` only
  std::optional<JournalOptions> journal{};              // empty: unfinished work is not kept
  std::vector<ExtraFile> extra_files{};                 // to copy; must be empty for a single file
  /// Whether all names and extra files are the source's own: no recipe, no files of another folder.
  /// A torch_dist checkpoint then keeps its names. For the format `megatron` only.
  bool keeps_names = false;
};

/// Starts a checkpoint of any format. `values` is parallel to `contents.values`; `fs` must outlive
/// the writer. Throws: what the format's own `create_…` throws; Error(already_exists) and
/// Error(mismatch) for kept work (KeptWork); Error(unsupported) if Tessera only reads the format.
std::unique_ptr<CheckpointWriter> create_checkpoint(FileSystem& fs, const std::string& destination,
                                                    CheckpointContents contents,
                                                    std::vector<Value> values,
                                                    const CreateOptions& options);

/// Throws what `create_checkpoint` would throw about the destination, its staging path (also about
/// kept work), and the files beside both paths. Changes nothing.
void check_staging(FileSystem& fs, const std::string& destination,
                   const CheckpointContents& contents, const std::vector<Value>& values,
                   const CreateOptions& options);

/// Checks that a move from `source` may write to the destination. `option`: how messages call the
/// option that allows replacing. A directory to replace may hold a file with a name in
/// `extra_files` only if the new checkpoint gets a file of the same bytes. Throws:
/// Error(invalid_argument) if one path is inside the other, if both are one URL, if `source` is in
/// `DST.partial`, or if something other than a checkpoint would be replaced; Error(already_exists)
/// if something exists and `overwrite` is `refuse`, or if the destination is a broken link.
void check_destination(const FileSystem& fs, const std::string& source,
                       const std::string& destination, OverwritePolicy overwrite,
                       const std::string& option, const std::vector<ExtraFile>& extra_files = {});

/// Returns the path where parts of a replaced checkpoint are left, because the writer of the new
/// one failed to remove them: the staging path, or the values file beside a single safetensors
/// file. Returns nothing if the writer removed everything. Requires: the checkpoint at
/// `destination` has replaced another one.
std::optional<std::string> left_over_at(const FileSystem& fs, const std::string& destination);

}  // namespace tessera::formats
