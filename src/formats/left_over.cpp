#include "tessera/formats/left_over.h"

#include "formats/safetensors/values_file.h"
#include "tessera/formats/detect.h"

namespace tessera::formats {

std::optional<std::string> left_over_at(const FileSystem& fs, const std::string& destination) {
  if (auto path = StagedDestination::left_over_at(fs, destination)) return path;
  const std::string tensors = without_trailing_slashes(destination);
  std::string values = detail::values_path_of(tensors);
  // Beside another format's checkpoint they may be somebody's, and have been left on purpose.
  const bool may_tell = fs.kind_of(tensors) == FileKind::regular &&
                        detail::is_values_file(fs, values) &&
                        detect_format(fs, tensors) == Format::safetensors;
  if (!may_tell || detail::names_values(fs, tensors, values)) return std::nullopt;
  return values;
}

}  // namespace tessera::formats
