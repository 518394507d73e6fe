#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Opens a model that is saved as `.bin` files, each written by `torch.save`. `path` is an index
/// (`*.bin.index.json`), or a directory that has an index, files named `…-00001-of-00003.bin`, one
/// `pytorch_model.bin`, or PEFT's `adapter_model.bin`. Reads the index and the pickle of each file.
/// The checkpoint has one rank, which holds everything. `as_dict`: see OpenOptions::as_dict. `fs`
/// must outlive the reader.
/// Throws: Error(not_found); Error(invalid_argument) for several models; Error(corruption) naming a
/// missing file, a tensor that its file does not hold, a tensor that two files hold, different
/// values of one name, or files that together are no state dict; whatever open_torch_zip throws.
std::unique_ptr<CheckpointReader> open_bin(const FileSystem& fs, std::string path,
                                           const std::vector<std::string>& as_dict = {});

}  // namespace tessera::formats
