#pragma once

#include <string>

namespace tessera::formats {

/// Whether a format itself asks for this annotation (FormatTraits::own_annotation), such as
/// `format=pt` of safetensors. All other annotations may be a user's.
bool is_own_annotation(const std::string& name, const std::string& text);

}  // namespace tessera::formats
