#include "formats/own_annotations.h"

#include <algorithm>

#include "tessera/formats/format_driver.h"

namespace tessera::formats {

bool is_own_annotation(const std::string& name, const std::string& text) {
  if (name == kKeyOrderAnnotation) return true;
  const std::string annotation = name + "=" + text;
  return std::ranges::any_of(format_drivers(), [&](const FormatDriver* driver) {
    return driver->traits().own_annotation == annotation;
  });
}

}  // namespace tessera::formats
