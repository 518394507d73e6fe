#include "formats/index_names.h"

#include <algorithm>

#include "formats/deepspeed/universal_members.h"
#include "formats/drivers.h"
#include "formats/indexed_format_driver.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats {

bool is_index_name(const std::string& name) {
  const bool is_numbered = name.find_first_of("0123456789") != std::string::npos;
  return name.ends_with(".index.json") || name == deepspeed::kLatestUniversal ||
         (opens_alone(name) && !is_numbered) ||
         std::ranges::any_of(format_drivers(), [&](const FormatDriver* driver) {
           return name == driver->description().in_directory;
         });
}

bool opens_alone(const std::string& name) {
  return std::ranges::any_of(format_drivers(), [&](const FormatDriver* driver) {
    return driver->destination_kind(name) == DestinationKind::file && driver->writes_file(name);
  });
}

bool may_be_whole_without_index(const std::string& name) {
  if (is_index_name(name)) return false;
  const bool is_in_folder = name.find('/') != std::string::npos;  // of a universal checkpoint
  return is_in_folder || opens_alone(name) || rank_files_driver().writes_file(name);
}

bool needs_index(const std::string& name) {
  return std::ranges::any_of(format_drivers(), [&](const FormatDriver* driver) {
    return dynamic_cast<const IndexedFormatDriver*>(driver) != nullptr && driver->writes_file(name);
  });
}

}  // namespace tessera::formats
