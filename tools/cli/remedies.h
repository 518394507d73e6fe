#pragma once

#include <string>

#include "tessera/base/error.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::cli {

/// Returns what can be done about an error on the command line; empty for Action::none.
std::string command_line_remedy(const Remedy& remedy);

/// Returns a finding in one line, with what can be done about it on the command line.
std::string finding_line(const formats::Finding& finding);

}  // namespace tessera::cli
