#pragma once

#include <optional>
#include <string>

#include "formats/pickle/pickle_object.h"

namespace tessera::formats::pickle {

/// Returns `NumPy array float32 [2, 3]` for a NumPy array, an empty text for any other object.
std::string numpy_array_in_words(Object object);

/// Returns the object that holds the bytes of an array that becomes a list of integers: uint32, one
/// dimension, at most 1,024 elements, little-endian. This is how NumPy's random generator keeps its
/// state. Returns nothing for any other object.
std::optional<Object> bytes_of_generator_state(Object object);

}  // namespace tessera::formats::pickle
