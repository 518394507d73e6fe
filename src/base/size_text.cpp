#include "tessera/base/size_text.h"

#include <array>
#include <charconv>

namespace tessera {

std::string iec_size(std::uint64_t nbytes) {
  if (nbytes < 1024) return counted(nbytes, "byte");
  static constexpr std::array kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(nbytes) / 1024;
  std::size_t unit = 0;
  while (value >= 1023.95 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  std::array<char, 16> text;  // up to four digits, and one
  char* const end = std::to_chars(text.begin(), text.end(), value, std::chars_format::fixed, 1).ptr;
  return std::string(text.begin(), end).append(" ").append(kUnits[unit]);
}

std::string rounded_size(std::uint64_t nbytes) {
  return nbytes < 1024 ? "" : "(" + iec_size(nbytes) + ")";
}

std::string exact_size(std::uint64_t nbytes) {
  std::string text = counted(nbytes, "byte");
  if (const std::string rounded = rounded_size(nbytes); !rounded.empty()) text += " " + rounded;
  return text;
}

std::string counted(std::uint64_t count, std::string_view noun, std::string_view plural) {
  std::string text = std::to_string(count) + " ";
  if (count == 1) return text.append(noun);
  if (!plural.empty()) return text.append(plural);
  return text.append(noun).append("s");
}

}  // namespace tessera
