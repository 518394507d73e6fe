#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::deepspeed {

/// Opens a checkpoint with pipeline or tensor parallelism, but without ZeRO ([Note: Model ranks],
/// files.h). Reads the modules. The optimizer becomes one value, and reading it throws: each stage
/// numbers its parameters from 0 on, and no file names them.
/// Throws: Error(corruption) naming a missing rank or layer; Error(unsupported) if the files do not
/// say how tensors are cut; and what `open_torch_zip` throws.
std::unique_ptr<CheckpointReader> open_without_zero(const FileSystem& fs, std::string path,
                                                    std::string folder,
                                                    const std::vector<std::string>& as_dict);

}  // namespace tessera::formats::deepspeed
