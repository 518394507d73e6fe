#pragma once

#include <string>
#include <string_view>

namespace tessera::formats {

/// The annotation (a text under a name) in which native checkpoints keep the order of keys. Readers
/// do not show it. Older releases did, so files that they wrote in other formats can have it.
inline constexpr std::string_view kKeyOrderAnnotation = "tessera.key_order";

/// Whether Tessera adds this annotation by itself: kKeyOrderAnnotation, or the one that a format's
/// writer adds (FormatTraits::own_annotation), such as `format=pt`. All others may be a user's.
bool is_own_annotation(const std::string& name, const std::string& text);

}  // namespace tessera::formats
