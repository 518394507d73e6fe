#include "base/python_json.h"

#include <algorithm>
#include <array>

#include "base/json.h"

namespace tessera {
namespace {

/// Returns the JSON with null in place of numbers that only Python writes, such as `Infinity`.
std::string without_infinities(std::string_view text) {
  constexpr std::array<std::string_view, 3> kNumbers = {"-Infinity", "Infinity", "NaN"};
  std::string result;
  bool is_in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '"') is_in_string = !is_in_string;
    const std::string_view rest = text.substr(i);
    const auto number = std::ranges::find_if(
        kNumbers, [&](std::string_view each) { return rest.starts_with(each); });
    if (!is_in_string && number != kNumbers.end()) {
      result += "null";
      i += number->size() - 1;
      continue;
    }
    result += text[i];
    if (is_in_string && text[i] == '\\' && i + 1 < text.size()) result += text[++i];
  }
  return result;
}

}  // namespace

Value parse_python_json(std::string_view text, const std::string& path) {
  return parse_json(without_infinities(text), path);
}

}  // namespace tessera
