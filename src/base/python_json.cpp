#include "base/python_json.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include "base/json_events.h"

namespace tessera {
namespace {

/// A JSON text without numbers that only Python writes.
struct StandardJson {
  std::string text;
  std::vector<std::size_t> added;  // positions of bytes that the text has more than Python's
};

/// Returns the JSON with null in place of numbers that only Python writes, such as `Infinity`.
/// Spaces keep the positions of what follows, as far as possible: `NaN` is shorter than null.
StandardJson without_infinities(std::string_view text) {
  constexpr std::array<std::string_view, 3> kNumbers = {"-Infinity", "Infinity", "NaN"};
  constexpr std::string_view kNull = "null";
  StandardJson result;
  bool is_in_string = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '"') is_in_string = !is_in_string;
    const std::string_view rest = text.substr(i);
    const auto number = std::ranges::find_if(
        kNumbers, [&](std::string_view each) { return rest.starts_with(each); });
    if (!is_in_string && number != kNumbers.end()) {
      result.text += kNull;
      if (number->size() < kNull.size()) {
        result.added.push_back(result.text.size() - 1);
      } else {
        result.text.append(number->size() - kNull.size(), ' ');
      }
      i += number->size() - 1;
      continue;
    }
    result.text += text[i];
    if (is_in_string && text[i] == '\\' && i + 1 < text.size()) result.text += text[++i];
  }
  return result;
}

}  // namespace

Value parse_python_json(std::string_view text, const std::string& path) {
  const StandardJson json = without_infinities(text);
  return detail::parse_changed_json(json.text, path, json.added);
}

}  // namespace tessera
