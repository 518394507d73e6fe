#pragma once

#include <map>
#include <string>

namespace tessera::formats {

/// Returns the quantization method that texts beside the tensors name, as Nunchaku's single files
/// do: `quantization_config` in the `__metadata__` of safetensors, or in the `config` there.
/// Returns `unknown` for a `quantization_config` without a method; empty if there is none.
std::string quantization_method_in(const std::map<std::string, std::string>& annotations);

}  // namespace tessera::formats
