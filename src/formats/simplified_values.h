#pragma once

#include <cstddef>
#include <vector>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// A reader that learns only from a value's own bytes what it reads as something plainer, such as
/// the reader of DCP: `.metadata` does not tell. Thread-safe.
class SimplifiedValues {
 public:
  virtual ~SimplifiedValues() = default;
  /// Reads a value again, and returns what is plainer in it, as far as `contents().simplifications`
  /// lacks it. The names are relative to the value. Throws: as read_value.
  virtual std::vector<Simplification> simplifications_of_value(std::size_t value_index) const = 0;
};

/// Returns nothing for a reader that is no SimplifiedValues.
inline std::vector<Simplification> simplifications_of_value(const CheckpointReader& reader,
                                                            std::size_t value_index) {
  const auto* const values = dynamic_cast<const SimplifiedValues*>(&reader);
  if (values == nullptr) return {};
  return values->simplifications_of_value(value_index);
}

}  // namespace tessera::formats
