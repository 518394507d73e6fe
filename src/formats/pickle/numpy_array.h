#pragma once

#include <optional>
#include <string>

#include "formats/pickle/pickle_object.h"

namespace tessera::formats::pickle {

/// Returns `NumPy array float32 [2, 3]` for a NumPy array, an empty text for any other object.
std::string numpy_array_in_words(Object object);

/// Returns the object with the bytes of an array like the state of NumPy's generator: uint32, one
/// dimension, at most 1,024 elements, little-endian; nothing for any other object. The reader turns
/// such an array into a list.
std::optional<Object> bytes_of_generator_state(Object object);

}  // namespace tessera::formats::pickle
