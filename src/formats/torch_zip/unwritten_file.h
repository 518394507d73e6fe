#pragma once

#include <string>
#include <vector>

#include "formats/torch_zip/torch_save_layout.h"
#include "tessera/base/value.h"

namespace tessera::formats::torch_zip {

/// Throws Error(unsupported) if Tessera's reader would refuse a file with this layout, for example
/// because two entries have one flattened name, or nesting is too deep. Writes no file. `path`: for
/// the message. `as_dict`: classes whose objects the reader reads as dicts.
void require_readable(const TorchSaveLayout& layout, const std::string& path,
                      const std::vector<std::string>& as_dict = {});

/// Throws Error(unsupported) if Tessera's reader would refuse a file of `torch_save_value(value)`,
/// for example because nesting is too deep.
void require_readable(const Value& value);

}  // namespace tessera::formats::torch_zip
