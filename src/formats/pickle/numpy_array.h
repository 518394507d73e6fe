#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "formats/pickle/pickle_object.h"

namespace tessera::formats::pickle {

/// Describes a NumPy array: `NumPy array float32 [2, 3]`. Empty if `object` is no NumPy array.
std::string numpy_array_in_words(Object object);

/// An array like those in the states of NumPy's generators: uint32 or uint64, one dimension, at
/// most 1,024 elements, little-endian. The reader turns it into a list.
struct GeneratorState {
  std::size_t numel;
  std::size_t itemsize;
  Object elements;  // bytes, or whatever else the file has there
};

/// Returns the parts of an array like those in the states of NumPy's generators; nothing for any
/// other object.
std::optional<GeneratorState> generator_state(Object object);

}  // namespace tessera::formats::pickle
