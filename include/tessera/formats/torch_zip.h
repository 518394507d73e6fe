#pragma once

#include <memory>
#include <string>

#include "tessera/base/file_system.h"
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

}  // namespace tessera::formats
