#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Opens a model that is saved as `.bin` files, each written by `torch.save`: a directory with
/// `pytorch_model.bin.index.json`, with files that are named `…-00001-of-00003.bin`, or with one
/// `pytorch_model.bin`; or the path of an index. Reads the index and the pickle of each file; files
/// are opened again when tensors are read. One rank holds everything. `as_dict`:
/// OpenOptions::as_dict. `fs` must outlive the reader.
/// Throws: Error(not_found); Error(corruption) naming a missing file, a tensor that its file does
/// not hold, or one that two files hold; what open_torch_zip throws.
std::unique_ptr<CheckpointReader> open_bin(const FileSystem& fs, std::string path,
                                           const std::vector<std::string>& as_dict = {});

}  // namespace tessera::formats
