#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "formats/native/index.h"
#include "formats/native/rank_files.h"
#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/native.h"

namespace tessera::formats::native {

// These implement the functions of parts.h; the one for `finish_parts` is `rebuild_native_index`.

std::unique_ptr<CheckpointWriter> create_part(FileSystem& fs, std::string directory,
                                              CheckpointContents contents,
                                              const std::vector<Value>& values, int rank,
                                              const NativeWriteOptions& options);

std::uint64_t join_parts(const FileSystem& fs, const std::string& directory,
                         CheckpointContents contents, const std::vector<Value>& values,
                         const NativeWriteOptions& options);

/// Reads the header and the index of a rank's complete file. Throws: Error(corruption) with the
/// likely cause if the index differs from `expected`, apart from the places of the pieces.
RankFileIndex read_part(const FileSystem& fs, const std::string& directory, std::int64_t rank,
                        Index expected, std::int64_t world_size, std::string_view likely_cause);

void seal_part(FileSystem& fs, const std::string& directory, int rank, std::uint64_t token);

/// Returns the index of a checkpoint to be written. Only linked pieces have a place in it. Throws:
/// Error(invalid_argument) for invalid contents; Error(corruption) for an invalid shape.
Index describe_checkpoint(SharedContents contents, const std::vector<Value>& values,
                          const NativeWriteOptions& options, const std::string& path);

}  // namespace tessera::formats::native
