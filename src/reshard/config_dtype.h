#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/dtype.h"

namespace tessera::reshard {

/// A configuration of Hugging Face (`config.json`) with another dtype.
struct EditedConfig {
  std::string text;
  std::string what;  // such as `torch_dtype: float32 to bfloat16`
};

/// Puts `dtype` into a configuration: into `torch_dtype` and `dtype` of the outermost object and of
/// the objects `…_config` in it, except `quantization_config`, where they name another floating
/// dtype. Every other byte stays. Returns nothing if there is nothing to change, or if the text is
/// not JSON.
std::optional<EditedConfig> with_dtype(std::string_view config, DType dtype);

}  // namespace tessera::reshard
