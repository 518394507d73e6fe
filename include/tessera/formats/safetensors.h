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
/// In a directory, the index names the files. Without an index, all `.safetensors` files belong to
/// one checkpoint. They have whole tensors, or shards that PyTorch's HuggingFaceStorageWriter wrote
/// (their `__metadata__` says where each shard is in its tensor). A tensor of a dtype that torch
/// lacks becomes a value that `read_value` refuses. Reads no tensor bytes. `fs` must outlive the
/// reader. Layout on disk: docs/formats/safetensors.md. Throws: Error(not_found); Error(corruption)
/// naming file, tensor and rule; Error(unsupported) if one of several files without an index refers
/// to a values file; Error(invalid_argument) if the directory has several models or indexes.
std::unique_ptr<CheckpointReader> open_safetensors(const FileSystem& fs, std::string path);

/// Returns the bytes that the whole file should have according to its header. Reads only the
/// header. Throws: Error(corruption) if the header is invalid.
std::uint64_t safetensors_nbytes(const ReadableFile& file);

/// How safetensors files are written.
struct SafetensorsWriteOptions {
  /// The most tensor bytes in one file; a larger tensor gets its own file. Empty: only one file.
  std::optional<std::uint64_t> max_shard_nbytes{};
  /// The files in a directory are named `<stem>.safetensors` or
  /// `<stem>-00001-of-0000N.safetensors`. Empty: `adapter_model` if `adapter_config.json` is one of
  /// CreateOptions::extra_files, as PEFT expects; otherwise `model`.
  std::string stem{};
};

/// Starts a checkpoint that Python's safetensors can load. A destination whose name ends in
/// `.safetensors` is a single file. Any other destination is a directory with `model.safetensors`,
/// or with `model-00001-of-0000N.safetensors` files and `model.safetensors.index.json`. (Only
/// `create_checkpoint`, which copies extra files, heeds `options.stem`.)
///
/// safetensors has no place for values, key paths, kinds of state and flat units. They go to a file
/// `<model>.safetensors.values.json`; if there are no values, to `__metadata__` or the index.
/// Aliases always go to `__metadata__`. `values` is parallel to `contents.values`. `fs` must
/// outlive the writer. Throws: Error(invalid_argument) if a tensor is not one whole piece, or if
/// `destination` is one file but `max_shard_nbytes` requires several; Error(unsupported) naming
/// tensors whose dtype or name safetensors cannot hold; Error(already_exists).
std::unique_ptr<CheckpointWriter> create_safetensors(
    FileSystem& fs, std::string destination, CheckpointContents contents, std::vector<Value> values,
    OverwritePolicy overwrite = OverwritePolicy::refuse,
    const SafetensorsWriteOptions& options = {});

}  // namespace tessera::formats
