#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Opens a file that `torch.save` (PyTorch 1.6 or later) or `torch.jit.save` wrote, reading its
/// directory and its pickle. One rank holds everything; each tensor is one piece.
/// Names are the nested keys joined by dots, list positions as numbers. A tensor or a value that
/// was saved by itself is named `tensor` or `value`. A name that views the same elements as another
/// one in the same shape becomes an alias of the first in byte order. Views come out row-major.
/// `fs` must outlive the reader. The layout on disk: docs/formats/torch_zip.md.
/// Throws: Error(not_found); Error(corruption); Error(unsupported) naming a foreign global, a
/// tensor that is not dense, two entries of one flattened name, or a file from before PyTorch 1.6.
std::unique_ptr<CheckpointReader> open_torch_zip(const FileSystem& fs, std::string path);

/// Starts a file that `torch.load(…, weights_only=True)` loads, also with `mmap=True`: nested dicts
/// and lists by the key paths, each tensor contiguous in a storage of its own, an alias as a tensor
/// of the same storage. Blocks may be written in any order. `values` is parallel to
/// `contents.values`. Kinds of state, flat units and annotations are left out.
/// Throws: Error(invalid_argument) unless every tensor is one piece that is all of it and the key
/// paths make up one tree; Error(unsupported) naming a value that cannot be pickled, or what the
/// file could not be read back for, such as two entries of one flattened name;
/// Error(already_exists).
std::unique_ptr<CheckpointWriter> create_torch_zip(
    FileSystem& fs, std::string destination, CheckpointContents contents, std::vector<Value> values,
    OverwritePolicy overwrite = OverwritePolicy::refuse);

}  // namespace tessera::formats
