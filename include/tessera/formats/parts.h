#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/native.h"

namespace tessera::formats {

/// [Note: Parts] Several processes write one checkpoint together, each its own rank's part, into a
/// directory that all of them see. The result is what `create_native` or `create_dcp` writes alone,
/// byte for byte. Each step waits until the one before is done, on all ranks:
///
///     coordinator only   makes an empty directory, such as a StagedDestination's staging path
///     all ranks          create_part, write_block for every block, commit
///     coordinator only   join_parts, whose result all ranks get
///     all ranks          seal_part
///     coordinator only   finish_parts, then makes the directory appear at its destination
///
/// All ranks pass equal contents, values and options. A failure on any rank ends it for all: the
/// coordinator removes the directory, in which a part may have left files.
///
/// Until `finish_parts` has returned the directory is no checkpoint to any reader, whatever process
/// died where: `index.h5` or `.metadata` is missing, which comes last and whole. Opening says
/// Error(not_found), or Error(corruption) where native rank files lie there without the index;
/// `open_checkpoint` says Error(unsupported) or Error(corruption). `rebuild_native_index` refuses
/// rank files that were not sealed.
struct PartOptions {
  Format format{};              // native or dcp
  NativeWriteOptions native{};  // for native alone
};

/// Starts one rank's part. The writer knows the contents of the whole checkpoint, but has only this
/// rank's pieces in `write_order` and takes no others. Files have their names from `commit` on, by
/// which they are complete and synced. Destroyed without it, the part may leave files.
/// Throws: as `create_native` and `create_dcp`; Error(invalid_argument) where there is no such
/// rank; Error(unsupported) for other formats.
std::unique_ptr<CheckpointWriter> create_part(FileSystem& fs, std::string directory,
                                              CheckpointContents contents,
                                              std::vector<Value> values, int rank,
                                              const PartOptions& options);

/// Checks that all parts are there and returns what `seal_part` needs to know of them. Changes no
/// file. Requires: every rank has committed.
/// Throws: Error(corruption) naming a rank file that is missing, incomplete, or was written for
/// other contents, values or options (native) or has another size than they give (dcp, whose files
/// do not say what they were written for: where ranks may disagree, the caller compares before).
std::uint64_t join_parts(const FileSystem& fs, const std::string& directory,
                         const CheckpointContents& contents, const std::vector<Value>& values,
                         const PartOptions& options);

/// Marks one rank's file as belonging to this checkpoint, and syncs it; nothing for dcp.
/// Requires: `token` is what `join_parts` returned.
void seal_part(FileSystem& fs, const std::string& directory, int rank, std::uint64_t token,
               const PartOptions& options);

/// Writes what makes the directory a checkpoint: `index.h5` or `.metadata`, synced. Where it
/// throws, neither is there. Requires: every rank has sealed. Throws: Error(corruption) naming a
/// rank file that is missing or was not sealed.
void finish_parts(FileSystem& fs, const std::string& directory, const CheckpointContents& contents,
                  const std::vector<Value>& values, const PartOptions& options);

}  // namespace tessera::formats
