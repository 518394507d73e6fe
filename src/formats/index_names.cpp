#include "formats/index_names.h"

#include <algorithm>

#include "tessera/formats/format_driver.h"

namespace tessera::formats {

bool is_index_name(const std::string& name) {
  return name.ends_with(".index.json") ||
         std::ranges::any_of(format_drivers(), [&](const FormatDriver* driver) {
           return name == driver->description().in_directory;
         });
}

}  // namespace tessera::formats
