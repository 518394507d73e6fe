#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace tessera::detail {

/// Returns the number of bytes (1 to 4) of the well-formed UTF-8 sequence that starts at
/// `text[begin]`, or 0 if there is none. Overlong forms, surrogates and codes above U+10FFFF are
/// not well-formed. Requires: `begin < text.size()`.
inline std::size_t utf8_sequence_nbytes(std::string_view text, std::size_t begin) {
  const auto byte_at = [&](std::size_t i) { return static_cast<unsigned char>(text[begin + i]); };
  const unsigned char lead = byte_at(0);
  if (lead < 0x80) return 1;
  std::size_t nbytes = 0;
  unsigned char second_min = 0x80;
  unsigned char second_max = 0xBF;
  if (lead >= 0xC2 && lead <= 0xDF) {
    nbytes = 2;
  } else if (lead >= 0xE0 && lead <= 0xEF) {
    nbytes = 3;
    if (lead == 0xE0) second_min = 0xA0;
    if (lead == 0xED) second_max = 0x9F;
  } else if (lead >= 0xF0 && lead <= 0xF4) {
    nbytes = 4;
    if (lead == 0xF0) second_min = 0x90;
    if (lead == 0xF4) second_max = 0x8F;
  } else {
    return 0;
  }
  if (text.size() - begin < nbytes) return 0;
  if (byte_at(1) < second_min || byte_at(1) > second_max) return 0;
  for (std::size_t i = 2; i < nbytes; ++i) {
    if (byte_at(i) < 0x80 || byte_at(i) > 0xBF) return 0;
  }
  return nbytes;
}

/// Returns the code point of a well-formed UTF-8 sequence of one character.
inline std::uint32_t code_point_of(std::string_view character) {
  const auto lead = static_cast<unsigned char>(character[0]);
  std::uint32_t code = character.size() == 1 ? lead : lead & (0x7FU >> character.size());
  for (const char next : character.substr(1)) {
    code = code << 6 | (static_cast<unsigned char>(next) & 0x3FU);
  }
  return code;
}

/// Whether a UTF-8 character changes how a terminal shows the text around it: control characters,
/// separators of lines and paragraphs (U+2028, U+2029), and characters that change the writing
/// direction (U+061C, U+200E, U+200F, U+202A to U+202E, U+2066 to U+2069).
inline bool is_control_character(std::string_view character) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(character[i]); };
  const auto is_between = [&](std::size_t i, unsigned first, unsigned last) {
    return byte(i) >= first && byte(i) <= last;
  };
  switch (character.size()) {
    case 1:
      return byte(0) < 0x20 || byte(0) == 0x7F;
    case 2:
      return (byte(0) == 0xC2 && byte(1) < 0xA0) || (byte(0) == 0xD8 && byte(1) == 0x9C);
    case 3:
      if (byte(0) != 0xE2) return false;
      return (byte(1) == 0x80 && (is_between(2, 0x8E, 0x8F) || is_between(2, 0xA8, 0xAE))) ||
             (byte(1) == 0x81 && is_between(2, 0xA6, 0xA9));
    default:
      return false;
  }
}

inline bool is_valid_utf8(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t nbytes = utf8_sequence_nbytes(text, i);
    if (nbytes == 0) return false;
    i += nbytes;
  }
  return true;
}

/// Returns 3 if there is a surrogate at `text[begin]`, in the three bytes that Python's
/// `surrogatepass` writes, else 0. Requires: `begin < text.size()`.
inline std::size_t surrogate_nbytes(std::string_view text, std::size_t begin) {
  const auto byte_at = [&](std::size_t i) { return static_cast<unsigned char>(text[begin + i]); };
  if (text.size() - begin < 3 || byte_at(0) != 0xED) return 0;
  return byte_at(1) >= 0xA0 && byte_at(1) <= 0xBF && (byte_at(2) & 0xC0) == 0x80 ? 3 : 0;
}

/// Says whether `text` is a Python str encoded with `surrogatepass`: UTF-8 in which surrogates are
/// allowed.
inline bool is_valid_python_str(std::string_view text) {
  for (std::size_t i = 0; i < text.size();) {
    std::size_t nbytes = utf8_sequence_nbytes(text, i);
    if (nbytes == 0) nbytes = surrogate_nbytes(text, i);
    if (nbytes == 0) return false;
    i += nbytes;
  }
  return true;
}

}  // namespace tessera::detail
