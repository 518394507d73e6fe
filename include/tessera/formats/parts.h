#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/native.h"

// [Note: Rank parts] Several processes (ranks) write one checkpoint together. Each rank writes its
// part (the pieces whose Piece::rank is its number) into one directory that all ranks see. The
// files are the same, byte for byte, as those that `create_native` or `create_dcp` writes in one
// process. The caller begins each action only when all ranks have finished the action before it:
//
//     coordinator only   makes an empty directory, such as a StagedDestination's staging path
//     all ranks          create_part, write_block for every block, commit
//     coordinator only   join_parts; sends the token that it returns to all ranks
//     all ranks          seal_part
//     coordinator only   finish_parts, then makes the directory appear at its destination
//
// All ranks must pass equal contents, values and options. If a rank fails, the caller must stop all
// ranks and let the coordinator remove the directory with all files that the ranks left in it.
//
// The last file, `index.h5` (native) or `.metadata` (dcp), makes the directory a checkpoint. It
// appears only in `finish_parts`, and complete. If a process dies before that, no reader takes the
// directory for a checkpoint: `open_native` and `open_dcp` throw Error(not_found), or
// Error(corruption) if there is a `rank-00000.h5` but no index. `open_checkpoint`, which first
// detects the format, throws Error(unsupported) or Error(corruption). `rebuild_native_index`
// refuses rank files that were not sealed.
namespace tessera::formats {

/// Options of one rank's part.
struct PartOptions {
  Format format{};              // native or dcp
  NativeWriteOptions native{};  // for native only
};

/// Starts the part of `rank`, with the contents and values of the whole checkpoint (`values` is
/// parallel to `contents.values`). The writer accepts only this rank's pieces; its `write_order`
/// lists them. Its `commit` completes, syncs and renames the part's files; without `commit`, files
/// may stay. `fs` must outlive the writer. Throws: as `create_native` and `create_dcp`;
/// Error(invalid_argument) if there is no such rank; Error(unsupported) for other formats.
std::unique_ptr<CheckpointWriter> create_part(FileSystem& fs, std::string directory,
                                              CheckpointContents contents,
                                              std::vector<Value> values, int rank,
                                              const PartOptions& options);

/// Checks that all parts exist and returns the token that `seal_part` needs. Changes no file.
/// Requires: every rank has committed its part.
/// Throws: Error(corruption) naming a rank file
/// - that is missing or incomplete;
/// - native: that a rank wrote for other contents, values or options;
/// - dcp: that has the wrong size. DCP files do not record contents or options. If the ranks may
///   have passed different ones, the caller must compare them first.
std::uint64_t join_parts(const FileSystem& fs, const std::string& directory,
                         const CheckpointContents& contents, const std::vector<Value>& values,
                         const PartOptions& options);

/// Marks one rank's file as part of this checkpoint, and syncs the file. Does nothing for dcp.
/// `token`: from `join_parts`. Throws: Error(corruption) if this rank's file is already sealed.
void seal_part(FileSystem& fs, const std::string& directory, int rank, std::uint64_t token,
               const PartOptions& options);

/// Writes and syncs the file that makes the directory a checkpoint: `index.h5` or `.metadata`. If
/// the call throws, this file does not exist. Requires: every rank has called `seal_part`. Throws:
/// Error(corruption) naming a rank file that is missing or not sealed (native; dcp does not check).
void finish_parts(FileSystem& fs, const std::string& directory, const CheckpointContents& contents,
                  const std::vector<Value>& values, const PartOptions& options);

}  // namespace tessera::formats
