#include "base/size_text.h"

#include <array>
#include <charconv>

#include "base/checked_math.h"

namespace tessera {
namespace {

constexpr std::string_view kUnitLetters = "kmgtpe";

char lower(char c) {
  return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
}

std::optional<std::uint64_t> unit_factor(std::string_view unit) {
  if (unit.empty() || (unit.size() == 1 && lower(unit[0]) == 'b')) return 1;
  const auto letter = kUnitLetters.find(lower(unit[0]));
  if (letter == std::string_view::npos) return std::nullopt;
  const std::string_view rest = unit.substr(1);
  const bool binary =
      rest.empty() || (rest.size() == 2 && lower(rest[0]) == 'i' && lower(rest[1]) == 'b');
  const bool decimal = rest.size() == 1 && lower(rest[0]) == 'b';
  if (!binary && !decimal) return std::nullopt;
  std::uint64_t factor = 1;
  for (std::size_t i = 0; i <= letter; ++i) factor *= binary ? 1024U : 1000U;
  return factor;
}

}  // namespace

std::string iec_size(std::uint64_t nbytes) {
  if (nbytes < 1024) return counted(nbytes, "byte");
  static constexpr std::array kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(nbytes) / 1024;
  std::size_t unit = 0;
  while (value >= 1023.95 && unit + 1 < kUnits.size()) {
    value /= 1024;
    ++unit;
  }
  std::array<char, 16> text;  // at most four digits, a point and a digit
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

std::optional<std::uint64_t> parse_size(std::string_view text) {
  if (text.empty() || text[0] < '0' || text[0] > '9') return std::nullopt;
  const char* end = text.data() + text.size();
  std::uint64_t whole = 0;
  auto parsed = std::from_chars(text.data(), end, whole);
  if (parsed.ec != std::errc()) return std::nullopt;
  double number = 0;
  const bool is_whole = parsed.ptr == end || *parsed.ptr != '.';
  if (!is_whole) {
    parsed = std::from_chars(text.data(), end, number, std::chars_format::fixed);
    if (parsed.ec != std::errc()) return std::nullopt;
  }
  std::string_view unit(parsed.ptr, static_cast<std::size_t>(end - parsed.ptr));
  if (unit.size() > 1 && unit.starts_with(' ')) unit.remove_prefix(1);
  const auto factor = unit_factor(unit);
  if (!factor) return std::nullopt;
  if (is_whole) return checked_mul(whole, *factor);
  if (*factor == 1) return std::nullopt;  // a part of a byte
  const double nbytes = number * static_cast<double>(*factor);
  if (!(nbytes < 0x1p63)) return std::nullopt;
  return static_cast<std::uint64_t>(nbytes);
}

std::string spell_size(std::uint64_t nbytes) {
  std::string shortest = std::to_string(nbytes);
  for (const std::string_view unit : {"TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "kB"}) {
    const std::uint64_t factor = *unit_factor(unit);
    std::array<char, 32> number;
    char* const end = std::to_chars(number.begin(), number.end(),
                                    static_cast<double>(nbytes) / static_cast<double>(factor),
                                    std::chars_format::fixed)
                          .ptr;
    const std::string text = std::string(number.begin(), end).append(unit);
    if (text.size() < shortest.size() && parse_size(text) == nbytes) shortest = text;
  }
  return shortest;
}

}  // namespace tessera
