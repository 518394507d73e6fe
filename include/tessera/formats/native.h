#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Opens a checkpoint in Tessera's own format: a directory with `index.h5` and one `rank-00000.h5`
/// per rank. Reads the index only, in two reads; a rank file is opened, and held against the index,
/// when its first byte is asked for. `fs` must outlive the reader.
/// The layout on disk: docs/formats/native.md.
/// Throws: Error(not_found) where there is no such directory; Error(unsupported) where `index.h5`
/// is no file of this format, or of a later version; Error(corruption).
std::unique_ptr<CheckpointReader> open_native(const FileSystem& fs, std::string path);

/// How native files are written. Readers take all of it from the files.
struct NativeWriteOptions {
  /// Whether pieces are compressed, each chunk by itself.
  enum class Compression { none, zstd };
  Compression compression = Compression::none;  // of pieces of 64 KiB and more

  /// One of zstd's own levels, -100 to 19. Nothing: what suits each chunk. That is the entropy
  /// stage alone for weights, in which matching finds nothing, and level 1 where there are runs.
  std::optional<int> zstd_level{};

  /// Bytes of a compressed chunk before compression; what a small range read costs. A multiple of
  /// 16, at most 64 MiB. Pieces below 64 KiB are never compressed.
  std::uint64_t chunk_nbytes = std::uint64_t{1} << 20;

  /// Bytes that `write_block` takes at a time where nothing is compressed: a multiple of 64 KiB.
  /// Does not change the files.
  std::uint64_t plain_block_nbytes = std::uint64_t{4} << 20;

  /// Whether `index.h5` shows every tensor as a virtual dataset to other HDF5 readers. Costs about
  /// 0.1 ms and 0.2 kB per tensor and piece; Tessera itself never reads them.
  enum class VirtualDatasets { write, omit };
  /// See VirtualDatasets.
  VirtualDatasets virtual_datasets = VirtualDatasets::write;
};

/// What parse_compression understands, in words.
inline constexpr std::string_view kCompressions =
    "none, zstd or zstd:LEVEL with a level from -100 to 19";

/// Returns the options that `text` stands for, or nothing: see kCompressions.
std::optional<NativeWriteOptions> parse_compression(std::string_view text);

/// Starts a native checkpoint. Every rank of `contents.world_size` gets a file, also where it holds
/// nothing. `values` is parallel to `contents.values`. HDF5 lays out the files by itself: `fs` must
/// show the operating system's files. Where the HDF5 library was built without thread-safety, the
/// application's own calls of it must not overlap with the writer's.
/// Throws: Error(invalid_argument) where the contents contradict themselves; Error(already_exists).
std::unique_ptr<CheckpointWriter> create_native(FileSystem& fs, std::string destination,
                                                CheckpointContents contents,
                                                std::vector<Value> values,
                                                OverwritePolicy overwrite = OverwritePolicy::refuse,
                                                const NativeWriteOptions& options = {});

/// Writes `index.h5` anew from the rank files alone, byte for byte the one that was lost (by the
/// same release of HDF5). An existing `index.h5` is replaced when the new one is complete.
/// Throws: Error(corruption) that lists the rank files that are missing, damaged, or from another
/// checkpoint, and the tensors of which the others do not have all elements, or on work in progress
/// that a journal lies beside; Error(already_exists) where `index.h5.partial` begins as no index
/// and as none that was begun; then `index.h5` is what it was.
void rebuild_native_index(FileSystem& fs, const std::string& path);

}  // namespace tessera::formats
