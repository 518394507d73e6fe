#include "cli/part_option.h"

#include <charconv>
#include <optional>
#include <string_view>

#include "cli/command_line.h"

namespace tessera::cli {

std::optional<int> parse_int(std::string_view text) {
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

PartOfWork parse_part(const std::string& option, const std::string& text,
                      const std::string& help_command) {
  const std::size_t slash = text.find('/');
  if (slash != std::string::npos) {
    const auto index = parse_int(std::string_view(text).substr(0, slash));
    const auto number = parse_int(std::string_view(text).substr(slash + 1));
    if (number && *number > kMaxParts) {
      throw UsageError(option + ": expected at most " + std::to_string(kMaxParts) +
                           " parts, found '" + printable(text) + "'",
                       help_command);
    }
    if (index && number && 0 <= *index && *index < *number) return {*index, *number};
  }
  throw UsageError(option + ": expected I/N with I from 0 to N-1, found '" + printable(text) + "'",
                   help_command);
}

}  // namespace tessera::cli
