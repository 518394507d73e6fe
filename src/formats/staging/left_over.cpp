#include "tessera/formats/create.h"

#include "formats/staging/staged_destination.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats {

std::optional<std::string> left_over_at(const FileSystem& fs, const std::string& destination) {
  if (auto path = StagedDestination::left_over_at(fs, destination)) return path;
  const std::string file = without_trailing_slashes(destination);
  for (const FormatDriver* driver : format_drivers()) {
    if (driver->side_files() == nullptr) continue;
    if (auto path = driver->side_files()->left_beside(fs, file)) return path;
  }
  return std::nullopt;
}

}  // namespace tessera::formats
