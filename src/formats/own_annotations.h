#pragma once

#include <string>
#include <string_view>

namespace tessera::formats {

/// The annotation in which native checkpoints keep the order of keys. Readers do not show it. If a
/// file of another format has it, an older release of Tessera, which did show it, wrote that file.
inline constexpr std::string_view kKeyOrderAnnotation = "tessera.key_order";

/// Whether the writer of a format adds this annotation by itself (FormatTraits::own_annotation), as
/// safetensors adds `format=pt`, or it is kKeyOrderAnnotation. All others may be a user's.
bool is_own_annotation(const std::string& name, const std::string& text);

}  // namespace tessera::formats
