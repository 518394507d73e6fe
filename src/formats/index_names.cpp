#include "formats/index_names.h"

#include <algorithm>

#include "formats/indexed_format_driver.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats {

bool is_index_name(const std::string& name) {
  return name.ends_with(".index.json") ||
         std::ranges::any_of(format_drivers(), [&](const FormatDriver* driver) {
           return name == driver->description().in_directory;
         });
}

bool needs_index(const std::string& name) {
  return std::ranges::any_of(format_drivers(), [&](const FormatDriver* driver) {
    return dynamic_cast<const IndexedFormatDriver*>(driver) != nullptr && driver->writes_file(name);
  });
}

}  // namespace tessera::formats
