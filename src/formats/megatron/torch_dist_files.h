#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "formats/part_of_check.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

// The files of Megatron's torch_dist beside those of DCP: `metadata.json`, which Megatron writes
// last, and `common.pt`, which has all that is equal on all ranks, except weights. Newer versions
// of Megatron keep what was in `common.pt` in an object of the DCP files. Source: megatron-core
// 0.16 and Megatron-LM of August 2026, dist_checkpointing/serialization.py and core.py.
namespace tessera::formats::megatron {

inline constexpr const char* kCommonFile = "common.pt";
inline constexpr const char* kConfigFile = "metadata.json";

/// The rule of the note of a recipe that gives rows of experts another order than the arguments in
/// `common.pt` say. A move then leaves out the two files.
inline constexpr const char* kRowsRule = "rows of experts";

/// If `name` is of the object that replaces `common.pt` (`run.common_state/shard_0_1`), or of an
/// item of this object, returns the text before it (`run.`).
std::optional<std::string_view> before_common_object(std::string_view name);
/// Whether an entry is an object of Megatron's (`rng_state/shard_0.0_1.1`), or an item of one that
/// is read item by item.
bool is_object(std::string_view name);
/// Whether a checkpoint of Megatron has that object.
bool has_common_object(const CheckpointContents& contents);

/// Opens that object, with arguments as a dict, if `path` is a DCP checkpoint that has it. The
/// reader shows nothing else. Null otherwise, also if the checkpoint cannot be opened: the caller's
/// own reader reports this.
std::unique_ptr<CheckpointReader> open_common_object(const FileSystem& fs, const std::string& path);

/// Whether `directory` is a torch_dist checkpoint, as its `metadata.json` says.
bool is_torch_dist(const FileSystem& fs, const std::string& directory);

/// Reports a missing or unusable `metadata.json`, and a missing `common.pt` that no object
/// replaces. If both are to be reported, reports only a note: the DCP part is complete. Reports
/// nothing if Megatron did not write the checkpoint.
void check_torch_dist_files(const FileSystem& fs, const std::string& directory,
                            const CheckpointContents& contents, const FindingSink& sink);

/// Does what check_torch_dist_files does, and checks every byte of `common.pt`. If a check has
/// several parts, one of them looks for the two files, and one of them reads `common.pt`.
void verify_torch_dist_files(const FileSystem& fs, const std::string& directory,
                             const CheckpointContents& contents, const FindingSink& sink,
                             const ProgressSink& progress, PartOfCheck& part);

}  // namespace tessera::formats::megatron
