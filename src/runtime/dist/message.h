#pragma once

#include <exception>
#include <string>

namespace tessera::dist {

/// Returns the message of a libtorch exception without its stack trace.
inline std::string message_of(const std::exception& error) {
  const std::string text = error.what();
  std::size_t end = text.find("Exception raised from ");
  if (end == std::string::npos) end = text.size();
  while (end > 0 && text[end - 1] == '\n') --end;
  return text.substr(0, end);
}

}  // namespace tessera::dist
