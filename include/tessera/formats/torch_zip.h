#pragma once

#include <memory>
#include <string>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Opens a file that `torch.save` wrote (a zip archive, torch 1.6 and later), or a TorchScript
/// archive: tensors and values by name, and no code is run. Keys are those that PyTorch's
/// distributed checkpoint would give the same object. Reads the archive's directory and
/// `data.pkl`; tensors are read when asked for, row-major whatever their strides. `fs` must outlive
/// the reader. The layout on disk: docs/formats/torch_zip.md.
/// Throws: Error(corruption); Error(unsupported) naming a foreign global, a compressed member, or a
/// tensor that is sparse, quantized or on the meta device.
std::unique_ptr<CheckpointReader> open_torch_zip(const FileSystem& fs, std::string path);

}  // namespace tessera::formats
