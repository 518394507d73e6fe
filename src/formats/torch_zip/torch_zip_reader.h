#pragma once

#include <memory>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_zip {

/// Does what `open_torch_zip` does, for an open file.
std::unique_ptr<CheckpointReader> read_torch_zip(std::unique_ptr<ReadableFile> file,
                                                 const std::vector<std::string>& as_dict = {});

}  // namespace tessera::formats::torch_zip
