#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tessera::formats::pickle {

/// Returns the decimal digits of a little-endian two's complement integer. Cost: quadratic.
std::string decimal_of(std::string_view twos_complement);

/// Returns the same decimal integer without leading zeros, and 0 for `-0`. Requires: `-?[0-9]+`.
std::string canonical_decimal(std::string_view decimal);

/// Undoes Python's escapes in the text between the quotes of a string. Returns nothing if an escape
/// is malformed.
std::optional<std::string> unescape_python_string(std::string_view text);

/// Returns the UTF-8 of Python's raw-unicode-escape (Latin-1 with `\uXXXX`); nothing if malformed.
std::optional<std::string> unescape_raw_unicode(std::string_view text);

/// Returns the bytes that `text.encode('latin1')` gives, or nothing if a character is above U+00FF.
/// Requires: valid UTF-8.
std::optional<std::string> encode_latin1(std::string_view text);

}  // namespace tessera::formats::pickle
