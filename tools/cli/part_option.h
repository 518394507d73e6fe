#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tessera::cli {

/// One part of work that several processes share: `I/N` on a command line.
struct PartOfWork {
  int index = 0;  // from 0
  int num_parts = 1;
};

constexpr int kMaxParts = 1 << 16;

/// Returns the integer that `text` spells; nothing if `text` is anything else.
std::optional<int> parse_int(std::string_view text);

/// Reads `I/N`. Throws: UsageError naming `option`.
PartOfWork parse_part(const std::string& option, const std::string& text,
                      const std::string& help_command);

}  // namespace tessera::cli
