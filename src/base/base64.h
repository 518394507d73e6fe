#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tessera::detail {

/// Returns `bytes` in base64: standard alphabet, padded (RFC 4648, section 4).
std::string base64_encode(std::string_view bytes);

/// Undoes `base64_encode`. Returns nothing if `text` cannot be a result of `base64_encode`.
std::optional<std::string> base64_decode(std::string_view text);

}  // namespace tessera::detail
