#pragma once

#include <string>

namespace tessera::formats {

/// Whether an annotation is one that a format itself asks for (FormatTraits::own_annotation), and
/// not a text that a user may have written.
bool is_own_annotation(const std::string& name, const std::string& text);

}  // namespace tessera::formats
