#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/native/index.h"
#include "formats/part_of_check.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::native {

/// Checks, reading only the headers, that every rank's file and every linked file exists, is
/// complete, and is the file that the index names. Reports each failure to `sink`, and continues.
/// Throws: Error(io).
void check_rank_files(const FileSystem& fs, const std::string& path, std::uint64_t checkpoint_id,
                      const Index& index, const FindingSink& sink);

/// Checks every byte of the checkpoint's files: headers, structure and data. Of linked files, skips
/// the data of pieces that only other checkpoints use. Reads the files in parallel on `num_threads`
/// threads (0: default_num_threads()). Findings come in the order index, rank files, linked files.
/// Continues after damage. The units of `part` are files. Throws: Error(io).
void verify_checkpoint(const FileSystem& fs, const std::string& path, std::uint64_t checkpoint_id,
                       const Index& index, const FindingSink& sink, const ProgressSink& progress,
                       int num_threads, PartOfCheck& part);

}  // namespace tessera::formats::native
