#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

#include "formats/pickle/pickle_object.h"

// Parts of objects that may not be there, or may be of another kind. These functions chain: the
// part of nothing is nothing.
namespace tessera::formats::torch_zip {

/// Returns an item of a tuple or a list.
std::optional<pickle::Object> item_of(const std::optional<pickle::Object>& object,
                                      std::size_t index);

/// Returns an attribute of an object of a class, or the value under a key of a dict.
std::optional<pickle::Object> attribute_of(std::optional<pickle::Object> object,
                                           std::string_view name);

}  // namespace tessera::formats::torch_zip
