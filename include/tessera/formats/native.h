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

struct LinkedPieces;

/// Opens a checkpoint in Tessera's own format: a directory with `index.h5` and one `rank-00000.h5`
/// per rank. Reads only the index, in two reads. A rank file is opened, and its header is compared
/// with the index, when its first byte is needed. `fs` must outlive the reader.
/// The layout on disk: docs/formats/native.md.
/// Throws:
/// - Error(not_found) if the directory or its index does not exist;
/// - Error(unsupported) if `path` is a file, if `index.h5` is not a Tessera index, or if a later
///   version of Tessera wrote it;
/// - Error(corruption) if the index is damaged, or missing beside a `rank-00000.h5`.
std::unique_ptr<CheckpointReader> open_native(const FileSystem& fs, std::string path);

/// How native files are written. Readers need none of these options, because the files record them.
struct NativeWriteOptions {
  /// Whether pieces are compressed, each chunk by itself.
  enum class Compression { none, zstd };
  Compression compression = Compression::none;  // of pieces of 64 KiB and more

  /// One of zstd's own levels, -100 to 19. Empty: the writer uses only zstd's entropy stage,
  /// because a search for matches finds nothing in weights. If the entropy stage more than halves a
  /// chunk, the writer also tries level 1, and stores the smaller result.
  std::optional<int> zstd_level{};

  /// A piece is compressed in chunks of this many bytes (uncompressed): a multiple of 64 KiB, at
  /// most 64 MiB. Any read decodes whole chunks. Pieces below 64 KiB are never compressed.
  std::uint64_t chunk_nbytes = std::uint64_t{1} << 20;

  /// Bytes of a block (`write_block`) of a piece without compression: a multiple of 64 KiB, at most
  /// 1 GiB. Does not change the files.
  std::uint64_t plain_block_nbytes = std::uint64_t{4} << 20;

  /// Whether `index.h5` shows every tensor as a virtual dataset to other HDF5 readers. Costs about
  /// 0.1 ms and 0.2 kB per tensor and piece. Tessera never reads virtual datasets.
  enum class VirtualDatasets { write, omit };
  /// See VirtualDatasets.
  VirtualDatasets virtual_datasets = VirtualDatasets::write;

  /// Pieces that an older checkpoint has with the same bytes, or with only a few changed rows
  /// (base_checkpoint.h); null: none. They keep the compression that they have there.
  std::shared_ptr<const LinkedPieces> linked{};
};

/// The texts that parse_compression accepts, in words.
inline constexpr std::string_view kCompressions =
    "none, zstd or zstd:LEVEL with a level from -100 to 19";

/// Returns the options that `text` stands for, or nothing. See kCompressions.
std::optional<NativeWriteOptions> parse_compression(std::string_view text);

/// Starts a native checkpoint. Every rank of `contents.world_size` gets a file, even if it holds
/// nothing. `values` is parallel to `contents.values`. `fs` must show the operating system's files,
/// because the writer locks the staging path there. If the HDF5 library was built without
/// thread-safety, the application's own HDF5 calls must not overlap with the writer's.
/// Throws: Error(invalid_argument) for wrong contents or bad options; Error(already_exists).
std::unique_ptr<CheckpointWriter> create_native(FileSystem& fs, std::string destination,
                                                CheckpointContents contents,
                                                std::vector<Value> values,
                                                OverwritePolicy overwrite = OverwritePolicy::refuse,
                                                const NativeWriteOptions& options = {});

/// Rebuilds `index.h5` from the rank files alone, byte for byte as it was (with the same release of
/// HDF5). An existing `index.h5` is replaced when the new one is complete. An error leaves
/// `index.h5` unchanged.
/// Throws:
/// - Error(not_found) if `path` is not a directory;
/// - Error(corruption) that lists the rank files that are missing, damaged, or from another
///   checkpoint, and the tensors that are incomplete without them;
/// - Error(corruption) if a writer with a journal has not finished the checkpoint;
/// - Error(already_exists) if `index.h5` or `index.h5.partial` exists and is not a Tessera index,
///   complete or unfinished.
void rebuild_native_index(FileSystem& fs, const std::string& path);

}  // namespace tessera::formats
