#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tessera::detail {

/// Returns the shortest decimal that reads back as `value`, as Python prints it: `1.0`, `1e-05`,
/// `1e+16`, `nan`, `-inf`. A finite number always has a point or an exponent.
std::string float_to_text(double value);

/// As float_to_text, but a NaN other than Python's `float("nan")` is written with its bits:
/// `nan:fff8000000000000`.
std::string float_to_exact_text(double value);
/// Undoes `float_to_exact_text`. Returns nothing if `text` is not a number.
std::optional<double> float_from_exact_text(std::string_view text);

}  // namespace tessera::detail
