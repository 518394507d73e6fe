#include "base/float_text.h"

#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "tessera/base/error.h"

namespace tessera::detail {

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

}  // namespace tessera::detail
