#pragma once

#include <string>
#include <string_view>

#include "tessera/base/value.h"

namespace tessera {

/// Returns what parse_json returns, but also takes `Infinity`, `-Infinity` and `NaN`, which Python
/// writes: they become None. Throws: Error as parse_json.
Value parse_python_json(std::string_view text, const std::string& path);

}  // namespace tessera
