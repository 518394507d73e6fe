#include "base/base64.h"

#include <array>
#include <cstdint>

namespace tessera::detail {
namespace {

constexpr std::string_view kAlphabet =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

constexpr std::array<std::int8_t, 256> make_digits() {
  std::array<std::int8_t, 256> digits{};
  digits.fill(-1);
  for (std::size_t i = 0; i < kAlphabet.size(); ++i) {
    digits[static_cast<unsigned char>(kAlphabet[i])] = static_cast<std::int8_t>(i);
  }
  return digits;
}
constexpr std::array<std::int8_t, 256> kDigits = make_digits();

}  // namespace

std::string base64_encode(std::string_view bytes) {
  std::string text;
  text.reserve((bytes.size() + 2) / 3 * 4);
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    const std::string_view group = bytes.substr(i, 3);
    std::uint32_t bits = 0;
    for (std::size_t k = 0; k < 3; ++k) {
      bits = bits << 8 | (k < group.size() ? static_cast<unsigned char>(group[k]) : 0U);
    }
    for (std::size_t k = 0; k < 4; ++k) {
      text += k <= group.size() ? kAlphabet[bits >> (18 - 6 * k) & 63] : '=';
    }
  }
  return text;
}

std::optional<std::string> base64_decode(std::string_view text) {
  if (text.size() % 4 != 0) return std::nullopt;
  std::string bytes;
  bytes.reserve(text.size() / 4 * 3);
  for (std::size_t i = 0; i < text.size(); i += 4) {
    std::string_view group = text.substr(i, 4);
    if (i + 4 == text.size()) {
      while (group.size() > 2 && group.ends_with('=')) group.remove_suffix(1);
    }
    std::uint32_t bits = 0;
    for (std::size_t k = 0; k < 4; ++k) {
      const int digit = k < group.size() ? kDigits[static_cast<unsigned char>(group[k])] : 0;
      if (digit < 0) return std::nullopt;
      bits = bits << 6 | static_cast<std::uint32_t>(digit);
    }
    const std::size_t num_bytes = group.size() - 1;
    for (std::size_t k = 0; k < num_bytes; ++k) {
      bytes += static_cast<char>(bits >> (16 - 8 * k) & 0xFF);
    }
    const std::uint32_t unused_bits =
        num_bytes == 3 ? 0 : bits & ((1U << (24 - 8 * num_bytes)) - 1);
    if (unused_bits != 0) return std::nullopt;
  }
  return bytes;
}

}  // namespace tessera::detail
