#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::deepspeed {

/// Opens a checkpoint of ZeRO with tensor parallelism, or of stage 1 or 2 with pipeline parallelism
/// or with both ([Note: Model ranks], files.h). Parameters get the names of the module. In a
/// pipeline they begin with the layer's number (`3.weight`) or, in a module that several stages
/// share, with `tied_modules.<key>`.
/// Throws: Error(corruption) naming a missing rank or layer, a parameter whose parts do not add up,
/// or files of different runs; Error(unsupported) if the files do not say how tensors are cut; and
/// what `open_torch_zip` throws.
std::unique_ptr<CheckpointReader> open_parallel(const FileSystem& fs, std::string path,
                                                std::string folder,
                                                const std::vector<std::string>& as_dict);

}  // namespace tessera::formats::deepspeed
