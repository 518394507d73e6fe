#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/base/value.h"

namespace tessera::inspect::detail {

/// Returns a text for each of two values that differ. The two texts always differ: if the values
/// print alike (NaNs with different bits, or long texts of which only the beginning is printed),
/// each text begins with the place of the first difference and shows it. `are_equal`: says whether
/// two values count as equal.
std::pair<std::string, std::string> differing_words(
    const Value& a, const Value& b,
    const std::function<bool(const Value& a, const Value& b)>& are_equal);

/// Returns the bytes of a little-endian number in hexadecimal: `0x7fc00001`.
std::string bits_in_words(std::string_view bytes);

}  // namespace tessera::inspect::detail
