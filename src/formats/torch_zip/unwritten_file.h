#pragma once

#include <string>
#include <vector>

#include "formats/torch_zip/torch_save_layout.h"

namespace tessera::formats::torch_zip {

/// Throws Error(unsupported) if Tessera's reader would refuse the file: two entries of one
/// flattened name, nesting that is too deep, or sizes that are too large. Writes nothing. `path`:
/// for the message. `as_dict`: classes whose objects the file may have.
void require_readable(const TorchSaveLayout& layout, const std::string& path,
                      const std::vector<std::string>& as_dict = {});

}  // namespace tessera::formats::torch_zip
