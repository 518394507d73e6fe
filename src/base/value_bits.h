#pragma once

#include "tessera/base/value.h"

namespace tessera::detail {

/// Whether two values are equal down to the bits of their floats: 0.0 and -0.0 are different, and a
/// NaN equals only a NaN with the same bits.
bool have_equal_bits(const Value& a, const Value& b);

}  // namespace tessera::detail
