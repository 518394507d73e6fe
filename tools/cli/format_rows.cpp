#include "cli/format_rows.h"

#include "base/word_list.h"
#include "tessera/formats/format_driver.h"

namespace tessera::cli {

std::vector<std::pair<std::string, std::string>> format_rows() {
  std::vector<std::pair<std::string, std::string>> rows;
  for (const formats::FormatDriver* driver : formats::format_drivers()) {
    const formats::FormatDescription description = driver->description();
    std::string text(description.title);
    text += ": ";
    if (!description.in_directory.empty()) {
      text += "a directory with " + std::string(description.in_directory);
      if (!description.as_file.empty()) text += ", or ";
    }
    if (!description.as_file.empty()) text += "a file";
    if (!driver->traits().can_be_written) text += "; read only";
    rows.emplace_back(driver->format().name(), std::move(text));
  }
  return rows;
}

std::string default_format_rule() {
  std::string rule;
  for (const formats::FormatDriver* driver : formats::format_drivers()) {
    const auto suffixes = driver->file_suffixes();
    if (!driver->traits().can_be_written || suffixes.empty()) continue;
    rule += std::string(driver->format().name()) + " if " + (rule.empty() ? "DST ends in " : "in ");
    rule += detail::choice_of(suffixes) + ", ";
  }
  return rule + "else " + std::string(formats::Format().name());
}

}  // namespace tessera::cli
