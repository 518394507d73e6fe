#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/base/value.h"

namespace tessera::inspect::detail {

/// Returns two values that differ as two texts that differ. If the values print alike (NaNs with
/// other bits, texts that are longer than what is printed), the texts begin with the place of the
/// first difference, and show it.
/// `are_equal`: says whether two values count as equal.
std::pair<std::string, std::string> differing_words(
    const Value& a, const Value& b,
    const std::function<bool(const Value& a, const Value& b)>& are_equal);

/// Returns bytes of a little-endian number in hexadecimal: `0x7fc00001`.
std::string bits_in_words(std::string_view bytes);

}  // namespace tessera::inspect::detail
