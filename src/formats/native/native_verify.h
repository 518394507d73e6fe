#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/native/index.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::native {

/// Checks that every rank's file is there, whole, and of this checkpoint, by its header.
/// Throws: Error(io).
void check_rank_files(const FileSystem& fs, const std::string& path, std::uint64_t checkpoint_id,
                      const std::vector<RankFileRecord>& records, const FindingSink& sink);

/// Checks every byte of the checkpoint's files: headers, structure and data. Rank files are read in
/// parallel, by `num_threads` (0: as many as there are cores); findings come in the order of ranks,
/// tensors and bytes. Goes on after damage.
void verify_checkpoint(const FileSystem& fs, const std::string& path, std::uint64_t checkpoint_id,
                       const Index& index, const FindingSink& sink, const ProgressSink& progress,
                       int num_threads);

}  // namespace tessera::formats::native
