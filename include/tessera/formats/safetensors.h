#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Opens safetensors: a `.safetensors` file, an index (`*.safetensors.index.json`), or a directory.
/// In a directory the index decides, else all its `.safetensors` files belong together: whole
/// tensors, or the shards of PyTorch's distributed checkpoint (HuggingFaceStorageWriter), whose
/// `__metadata__` says where in its tensor each shard lies. Reads headers only. `fs` must outlive
/// the reader. The layout on disk: docs/formats/safetensors.md.
/// Throws: Error(not_found) where there is none; Error(corruption) naming file, tensor and rule;
/// Error(unsupported) on a dtype that torch has no word for.
std::unique_ptr<CheckpointReader> open_safetensors(const FileSystem& fs, std::string path);

/// Returns how many bytes the file has by what its header lays out. Reads the header, and asks
/// nothing of what is behind it. Throws: Error(corruption) where the header is not sound.
std::uint64_t safetensors_nbytes(const ReadableFile& file);

/// How safetensors files are written.
struct SafetensorsWriteOptions {
  /// The most tensor bytes in one file; nothing: all in one. A larger tensor has a file of its own.
  std::optional<std::uint64_t> max_shard_nbytes{};
};

/// Starts safetensors that Python's safetensors loads. A destination whose name ends in
/// `.safetensors` is a single file; any other is a directory with `model.safetensors`, or with
/// `model-00001-of-0000N.safetensors` files and `model.safetensors.index.json`. What the format has
/// no place for (values, key paths, kinds of state, flat units) goes to
/// `<model>.safetensors.values.json` beside it, or where there are no values to `__metadata__`, so
/// that tensors alone need no second file. Aliases go to `__metadata__`. `values` is parallel to
/// `contents.values`.
/// Throws: Error(invalid_argument) unless every tensor is one piece that is all of it, or where one
/// file is asked for and more are needed; Error(unsupported) listing all tensors whose dtype or
/// name safetensors cannot hold; Error(already_exists).
std::unique_ptr<CheckpointWriter> create_safetensors(
    FileSystem& fs, std::string destination, CheckpointContents contents, std::vector<Value> values,
    OverwritePolicy overwrite = OverwritePolicy::refuse,
    const SafetensorsWriteOptions& options = {});

}  // namespace tessera::formats
