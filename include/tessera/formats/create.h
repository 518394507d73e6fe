#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/native.h"
#include "tessera/formats/safetensors.h"

namespace tessera::formats {

struct CreateOptions {
  Format format = Format::native;
  OverwritePolicy overwrite = OverwritePolicy::refuse;
  NativeWriteOptions native{};            // for native alone
  SafetensorsWriteOptions safetensors{};  // for safetensors alone
};

/// Starts a checkpoint of any format. `values` is parallel to `contents.values`; `fs` must outlive
/// the writer. Throws: what the format's own `create_…` throws.
std::unique_ptr<CheckpointWriter> create_checkpoint(FileSystem& fs, const std::string& destination,
                                                    CheckpointContents contents,
                                                    std::vector<Value> values,
                                                    const CreateOptions& options);

}  // namespace tessera::formats
