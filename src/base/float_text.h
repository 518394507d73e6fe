#pragma once

#include <string>

namespace tessera::detail {

/// Returns the shortest decimal that reads back as `value`, as Python prints it: `1.0`, `1e-05`,
/// `1e+16`, `nan`, `-inf`. A finite number always has a point or an exponent.
std::string float_to_text(double value);

}  // namespace tessera::detail
