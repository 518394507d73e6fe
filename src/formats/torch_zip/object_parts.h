#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

#include "formats/pickle/pickle_object.h"

// Access to parts of objects that may be missing or of another kind. Calls can be nested: the
// part of an empty optional is an empty optional.
namespace tessera::formats::torch_zip {

/// Returns an item of a tuple or a list; nothing if there is none.
std::optional<pickle::Object> item_of(const std::optional<pickle::Object>& object,
                                      std::size_t index);

/// Returns an attribute of an object, or the value under a key of a plain dict; nothing if none.
std::optional<pickle::Object> attribute_of(std::optional<pickle::Object> object,
                                           std::string_view name);

}  // namespace tessera::formats::torch_zip
