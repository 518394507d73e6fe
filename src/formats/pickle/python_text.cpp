#include "formats/pickle/python_text.h"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <vector>

namespace tessera::formats::pickle {
namespace {

void append_utf8(std::string& out, std::uint32_t code) {
  const auto byte = [&out](std::uint32_t value) { out += static_cast<char>(value); };
  if (code < 0x80) return byte(code);
  if (code < 0x800) {
    byte(0xc0 | code >> 6);
  } else {
    if (code < 0x10000) {
      byte(0xe0 | code >> 12);
    } else {
      byte(0xf0 | code >> 18);
      byte(0x80 | (code >> 12 & 0x3f));
    }
    byte(0x80 | (code >> 6 & 0x3f));
  }
  byte(0x80 | (code & 0x3f));
}

std::optional<std::uint32_t> hex_number(std::string_view text, std::size_t begin,
                                        std::size_t num_digits) {
  if (text.size() < begin + num_digits) return std::nullopt;
  std::uint32_t value = 0;
  const char* end = text.data() + begin + num_digits;
  const auto result = std::from_chars(text.data() + begin, end, value, 16);
  if (result.ec != std::errc{} || result.ptr != end) return std::nullopt;
  return value;
}

}  // namespace

std::string decimal_of(std::string_view twos_complement) {
  const bool negative = !twos_complement.empty() && (twos_complement.back() & 0x80) != 0;
  std::vector<std::uint32_t> limbs((twos_complement.size() + 3) / 4, negative ? ~0U : 0U);
  for (std::size_t i = 0; i < twos_complement.size(); ++i) {
    const std::uint32_t shift = static_cast<std::uint32_t>(i % 4) * 8;
    limbs[i / 4] &= ~(0xffU << shift);
    limbs[i / 4] |= std::uint32_t{static_cast<unsigned char>(twos_complement[i])} << shift;
  }
  if (negative) {  // magnitude: invert and add one
    bool carry = true;
    for (std::uint32_t& limb : limbs) {
      limb = ~limb + (carry ? 1 : 0);
      carry = carry && limb == 0;
    }
    if (carry) limbs.push_back(1);
  }
  std::string digits;  // last first
  while (!limbs.empty()) {
    std::uint64_t remainder = 0;
    for (auto limb = limbs.rbegin(); limb != limbs.rend(); ++limb) {
      remainder = remainder << 32 | *limb;
      *limb = static_cast<std::uint32_t>(remainder / 1'000'000'000);
      remainder %= 1'000'000'000;
    }
    while (!limbs.empty() && limbs.back() == 0) limbs.pop_back();
    for (int i = 0; i < 9; ++i, remainder /= 10) digits += static_cast<char>('0' + remainder % 10);
  }
  if (negative) digits += '-';
  std::reverse(digits.begin(), digits.end());
  return canonical_decimal(digits.empty() ? "0" : digits);
}

std::string canonical_decimal(std::string_view decimal) {
  const bool negative = decimal.substr(0, 1) == "-";
  std::string_view digits = decimal.substr(negative ? 1 : 0);
  digits.remove_prefix(std::min(digits.find_first_not_of('0'), digits.size() - 1));
  return (negative && digits != "0" ? "-" : "") + std::string(digits);
}

std::optional<std::string> unescape_python_string(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '\\') {
      out += text[i];
      continue;
    }
    if (++i == text.size()) return std::nullopt;
    switch (text[i]) {
      case '\\':
      case '\'':
      case '"':
        out += text[i];
        break;
      case 'a':
        out += '\a';
        break;
      case 'b':
        out += '\b';
        break;
      case 'f':
        out += '\f';
        break;
      case 'n':
        out += '\n';
        break;
      case 'r':
        out += '\r';
        break;
      case 't':
        out += '\t';
        break;
      case 'v':
        out += '\v';
        break;
      case 'x': {
        const auto code = hex_number(text, i + 1, 2);
        if (!code) return std::nullopt;
        out += static_cast<char>(*code);
        i += 2;
        break;
      }
      default:
        return std::nullopt;  // repr() writes no other escapes
    }
  }
  return out;
}

std::optional<std::string> unescape_raw_unicode(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    const bool is_escape = text[i] == '\\' && i + 1 < text.size();
    const char kind = is_escape ? text[i + 1] : '\0';
    if (kind != 'u' && kind != 'U') {
      append_utf8(out, static_cast<unsigned char>(text[i]));
      // The character after a backslash begins no escape of its own: `\\u0041` stays as it is.
      if (is_escape) append_utf8(out, static_cast<unsigned char>(text[++i]));
      continue;
    }
    const std::size_t num_digits = kind == 'u' ? 4 : 8;
    const auto code = hex_number(text, i + 2, num_digits);
    if (!code || *code > 0x10ffff) return std::nullopt;
    append_utf8(out, *code);
    i += 1 + num_digits;
  }
  return out;
}

std::optional<std::string> encode_latin1(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if (byte < 0x80) {
      out += text[i];
    } else if (byte <= 0xc3 && i + 1 < text.size()) {
      out +=
          static_cast<char>((byte & 0x03) << 6 | (static_cast<unsigned char>(text[i + 1]) & 0x3f));
      ++i;
    } else {
      return std::nullopt;
    }
  }
  return out;
}

}  // namespace tessera::formats::pickle
