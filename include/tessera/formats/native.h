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
/// per rank. Reads only the index, in two reads. The reader opens a rank file, and compares its
/// header with the index, when it needs the file's first byte. `fs` must outlive the reader.
/// The layout on disk: docs/formats/native.md.
/// Throws:
/// - Error(not_found) if the directory or its index does not exist;
/// - Error(unsupported) if `path` is a file, if `index.h5` is not a Tessera index, or if a later
///   version of Tessera wrote it;
/// - Error(corruption) if the index is damaged, or missing beside a `rank-00000.h5`.
std::unique_ptr<CheckpointReader> open_native(const FileSystem& fs, std::string path);

/// How a writer makes native files. Readers need no options: the files record what they need.
struct NativeWriteOptions {
  /// Whether the writer compresses pieces, each chunk of a piece by itself.
  enum class Compression { none, zstd };
  Compression compression = Compression::none;  // of pieces of 64 KiB and more

  /// One of zstd's own levels, -100 to 19. Empty: the writer uses only zstd's entropy stage,
  /// because a search for matches finds nothing in weights. If the entropy stage more than halves a
  /// chunk, the writer also tries level 1, and stores the smaller result.
  std::optional<int> zstd_level{};

  /// Bytes of a chunk before compression: a multiple of 64 KiB, at most 64 MiB. A read of any part
  /// of a chunk decodes the whole chunk. Pieces below 64 KiB are never compressed.
  std::uint64_t chunk_nbytes = std::uint64_t{1} << 20;

  /// Bytes that each `write_block` takes of a piece without compression: a multiple of 64 KiB, at
  /// most 1 GiB. Does not change the files.
  std::uint64_t plain_block_nbytes = std::uint64_t{4} << 20;

  /// Whether `index.h5` has a virtual dataset for every tensor, for other HDF5 programs to read.
  /// Costs about 0.1 ms and 0.2 kB per tensor and piece.
  enum class VirtualDatasets { write, omit };
  VirtualDatasets virtual_datasets = VirtualDatasets::write;  // Tessera never reads them

  /// Pieces that an older checkpoint has with the same bytes, or with only a few changed rows
  /// (link_pieces of base_checkpoint.h); null: none. They keep the compression of that checkpoint.
  std::shared_ptr<const LinkedPieces> linked{};
};

/// The texts that parse_compression accepts, in words.
inline constexpr std::string_view kCompressions =
    "none, zstd or zstd:LEVEL with a level from -100 to 19";

/// Returns default options with the compression `text`; nothing if it is not one of kCompressions.
std::optional<NativeWriteOptions> parse_compression(std::string_view text);

/// Starts a native checkpoint. Every rank of `contents.world_size` gets a file, even if it holds
/// nothing. `values` is parallel to `contents.values`. `fs` must show the operating system's files,
/// because the writer locks the staging path there. If the HDF5 library was built without
/// thread-safety, the application's own HDF5 calls must not overlap with the writer's.
/// Throws: Error(invalid_argument) for wrong contents or options; Error(already_exists) if
/// `destination` exists and `overwrite` is `refuse`, or if its staging path is in use.
std::unique_ptr<CheckpointWriter> create_native(FileSystem& fs, std::string destination,
                                                CheckpointContents contents,
                                                std::vector<Value> values,
                                                OverwritePolicy overwrite = OverwritePolicy::refuse,
                                                const NativeWriteOptions& options = {});

/// Rebuilds `index.h5` of the checkpoint at `path` from its rank files alone, byte for byte as it
/// was (with the same release of HDF5). Replaces an existing `index.h5` only when the new one is
/// complete; after an error, it is unchanged.
/// Throws:
/// - Error(not_found) if `path` is not a directory;
/// - Error(corruption) that lists the rank files that are missing, damaged, or from another
///   checkpoint, and the tensors that are incomplete without them;
/// - Error(corruption) if a writer with a journal has not finished the checkpoint;
/// - Error(already_exists) if `index.h5` or `index.h5.partial` exists and is not an index that
///   Tessera wrote or began to write.
void rebuild_native_index(FileSystem& fs, const std::string& path);

}  // namespace tessera::formats
