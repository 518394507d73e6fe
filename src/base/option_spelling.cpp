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

std::string spelled_flag(std::string_view name, OptionSpelling spelling) {
  return spelled_option(name, spelling == OptionSpelling::python ? "True" : "", spelling);
}

namespace {

std::string whose(OptionSpelling spelling) {
  return spelling == OptionSpelling::python ? "" : "its ";
}

}  // namespace

std::string kept_work_hint(OptionSpelling spelling) {
  return whose(spelling) + spelled_flag("resume", spelling) + " goes on with it, " +
         discard_hint(spelling);
}

std::string discard_hint(OptionSpelling spelling) {
  return whose(spelling) + spelled_flag("discard", spelling) + " starts from the beginning";
}

}  // namespace tessera
