#include "base/base64.h"

#include <nettle/base64.h>

#include <cstddef>
#include <cstdint>

namespace tessera::detail {

std::string base64_encode(std::string_view bytes) {
  std::string text(BASE64_ENCODE_RAW_LENGTH(bytes.size()), '\0');
  base64_encode_raw(text.data(), bytes.size(), reinterpret_cast<const std::uint8_t*>(bytes.data()));
  return text;
}

std::optional<std::string> base64_decode(std::string_view text) {
  // nettle's decoder, which is called below, is less strict: it skips spaces, and accepts text with
  // too little or too much padding.
  constexpr std::string_view kSpaces = " \t\n\v\f\r";
  if (text.size() % 4 != 0 || text.ends_with("===") ||
      text.find_first_of(kSpaces) != std::string_view::npos) {
    return std::nullopt;
  }
  std::string bytes(BASE64_DECODE_LENGTH(text.size()), '\0');
  std::size_t nbytes = bytes.size();
  base64_decode_ctx context;
  base64_decode_init(&context);
  if (base64_decode_update(&context, &nbytes, reinterpret_cast<std::uint8_t*>(bytes.data()),
                           text.size(), text.data()) == 0 ||
      base64_decode_final(&context) == 0) {
    return std::nullopt;
  }
  bytes.resize(nbytes);
  return bytes;
}

}  // namespace tessera::detail
