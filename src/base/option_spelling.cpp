#include "tessera/base/option_spelling.h"

#include <algorithm>

namespace tessera {

std::string spelled_option(std::string_view name, std::string_view argument,
                           OptionSpelling spelling) {
  const bool is_python = spelling == OptionSpelling::python;
  std::string text = is_python ? std::string(name) : "--" + std::string(name);
  if (is_python) std::ranges::replace(text, '-', '_');
  if (!argument.empty()) (text += is_python ? '=' : ' ') += argument;
  return text;
}

}  // namespace tessera
