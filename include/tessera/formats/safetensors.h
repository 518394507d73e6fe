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
/// In a directory, the index names the files; without an index all `.safetensors` files belong
/// together: whole tensors, or the shards of PyTorch's distributed checkpoint
/// (HuggingFaceStorageWriter), whose `__metadata__` gives the place of each shard in its tensor.
/// Reads no tensor bytes. `fs` must outlive the reader. The layout on disk:
/// docs/formats/safetensors.md.
/// Throws: Error(not_found); Error(corruption) naming file, tensor and rule; Error(unsupported) for
/// a dtype that torch does not have; Error(invalid_argument) for files of several models.
std::unique_ptr<CheckpointReader> open_safetensors(const FileSystem& fs, std::string path);

/// Returns the size of the whole file, which the header states. Reads only the header. Throws:
/// Error(corruption) if the header is invalid.
std::uint64_t safetensors_nbytes(const ReadableFile& file);

/// How safetensors files are written.
struct SafetensorsWriteOptions {
  /// The most tensor bytes in one file; nothing: one file. A larger tensor gets a file of its own.
  std::optional<std::uint64_t> max_shard_nbytes{};
  /// Whether files are always named `model…`. If false, and `adapter_config.json` is copied beside
  /// them, they are named `adapter_model…`, as PEFT expects.
  bool is_base_model = false;
};

/// Starts a checkpoint that Python's safetensors can load. A destination whose name ends in
/// `.safetensors` is a single file. Any other destination is a directory with `model.safetensors`,
/// or with `model-00001-of-0000N.safetensors` files and `model.safetensors.index.json`. (Only
/// `create_checkpoint`, which copies extra files, may name them `adapter_model…`, as PEFT does.)
///
/// What the format cannot store (values, key paths, kinds of state, flat units) goes to
/// `<model>.safetensors.values.json`; if there are no values, to `__metadata__` or the index.
/// Aliases always go to `__metadata__`. `values` is parallel to `contents.values`.
/// Throws: Error(invalid_argument) unless every tensor is one piece, or if the destination is one
/// file and several are needed; Error(unsupported) naming the tensors whose dtype or name
/// safetensors cannot hold; Error(already_exists).
std::unique_ptr<CheckpointWriter> create_safetensors(
    FileSystem& fs, std::string destination, CheckpointContents contents, std::vector<Value> values,
    OverwritePolicy overwrite = OverwritePolicy::refuse,
    const SafetensorsWriteOptions& options = {});

}  // namespace tessera::formats
