#include "base/float_text.h"

#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "tessera/base/error.h"

namespace tessera::detail {
namespace {

constexpr std::uint64_t kNanOfPython = 0x7FF8000000000000;  // float("nan")
constexpr std::string_view kNanWithBits = "nan:";           // before the bits, as 16 hex digits

}  // namespace

std::string float_to_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  const double magnitude = std::fabs(value);
  const bool is_fixed = magnitude == 0 || (magnitude >= 1e-4 && magnitude < 1e16);
  std::array<char, 64> buffer{};
  const auto [end, error] =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value,
                    is_fixed ? std::chars_format::fixed : std::chars_format::scientific);
  TESSERA_CHECK(error == std::errc{});
  std::string text(buffer.data(), end);
  if (is_fixed && text.find('.') == std::string::npos) text += ".0";
  return text;
}

std::string float_to_exact_text(double value) {
  const auto bits = std::bit_cast<std::uint64_t>(value);
  if (!std::isnan(value) || bits == kNanOfPython) return float_to_text(value);
  char digits[17];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(bits));
  return std::string(kNanWithBits) + digits;
}

std::optional<double> float_from_exact_text(std::string_view text) {
  if (!text.starts_with(kNanWithBits)) {
    double number = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
    return text == "nan" ? std::bit_cast<double>(kNanOfPython) : number;
  }
  text.remove_prefix(kNanWithBits.size());
  if (text.size() != 16 || text.find_first_not_of("0123456789abcdef") != text.npos) return {};
  std::uint64_t bits = 0;
  std::from_chars(text.data(), text.data() + text.size(), bits, 16);
  const auto number = std::bit_cast<double>(bits);
  if (!std::isnan(number) || bits == kNanOfPython) return std::nullopt;
  return number;
}

}  // namespace tessera::detail
