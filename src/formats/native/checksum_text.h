#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

namespace tessera::formats::native {

/// Returns a checksum for messages: `0x` and 16 digits.
inline std::string checksum_text(std::uint64_t checksum) {
  char text[19];
  std::snprintf(text, sizeof text, "0x%016llx", static_cast<unsigned long long>(checksum));
  return text;
}

}  // namespace tessera::formats::native
