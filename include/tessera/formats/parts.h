#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/native.h"

// [Note: Rank parts] Several processes write one checkpoint together. Each process writes the part
// of its own rank into a directory that all of them see. The result is the same, byte for byte, as
// what `create_native` or `create_dcp` writes. Each action begins when all ranks have finished the
// action before it:
//
//     coordinator only   makes an empty directory, such as a StagedDestination's staging path
//     all ranks          create_part, write_block for every block, commit
//     coordinator only   join_parts, whose result all ranks get
//     all ranks          seal_part
//     coordinator only   finish_parts, then makes the directory appear at its destination
//
// All ranks must pass equal contents, values and options. If a rank fails, the caller must stop all
// ranks and let the coordinator remove the directory, which may then contain files of parts.
//
// Until `finish_parts` has returned, no reader takes the directory for a checkpoint, even if a
// process dies at any point, because `index.h5` or `.metadata` is missing. This file appears last,
// and complete. Until then `open_native` and `open_dcp` throw Error(not_found), or
// Error(corruption) if there is a `rank-00000.h5` but no index. `open_checkpoint`, which first
// detects the format, throws Error(unsupported) or Error(corruption). `rebuild_native_index`
// refuses rank files that were not sealed.
namespace tessera::formats {

/// Options of one rank's part.
struct PartOptions {
  Format format{};              // native or dcp
  NativeWriteOptions native{};  // for native only
};

/// Starts one rank's part. The writer knows the contents of the whole checkpoint, but accepts only
/// this rank's pieces, which are in `write_order`. `commit` completes and syncs the files and gives
/// them their names. Without `commit`, the part may leave files.
/// Throws: as `create_native` and `create_dcp`; Error(invalid_argument) if there is no such rank;
/// Error(unsupported) for other formats.
std::unique_ptr<CheckpointWriter> create_part(FileSystem& fs, std::string directory,
                                              CheckpointContents contents,
                                              std::vector<Value> values, int rank,
                                              const PartOptions& options);

/// Checks that all parts exist and returns the token that `seal_part` needs. Changes no file.
/// Requires: every rank has committed.
/// Throws: Error(corruption) naming a rank file
/// - that is missing or incomplete;
/// - native: that was written for other contents, values or options;
/// - dcp: that has the wrong size. The files do not record contents or options, so the caller must
///   compare them first if ranks may disagree.
std::uint64_t join_parts(const FileSystem& fs, const std::string& directory,
                         const CheckpointContents& contents, const std::vector<Value>& values,
                         const PartOptions& options);

/// Marks one rank's file as part of this checkpoint and syncs it; does nothing for dcp.
/// Requires: `token` is what `join_parts` returned, and this rank's file is not sealed yet.
void seal_part(FileSystem& fs, const std::string& directory, int rank, std::uint64_t token,
               const PartOptions& options);

/// Writes and syncs the file that makes the directory a checkpoint: `index.h5` or `.metadata`. If
/// the call throws, this file does not exist. Requires: every rank has sealed. Throws:
/// Error(corruption) naming a rank file that is missing or not sealed (native; dcp does not check).
void finish_parts(FileSystem& fs, const std::string& directory, const CheckpointContents& contents,
                  const std::vector<Value>& values, const PartOptions& options);

}  // namespace tessera::formats
