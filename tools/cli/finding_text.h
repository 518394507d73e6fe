#pragma once

#include <string>

#include "tessera/formats/checkpoint.h"

namespace tessera::cli {

/// Returns a finding in one line, as an error's: `<where>: <rule>: expected <x>, found <y>`.
std::string finding_to_string(const formats::Finding& finding);

}  // namespace tessera::cli
