#pragma once

#include <string>

#include "tessera/base/error.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::cli {

/// Returns a remedy in the words of the command line; empty for Action::none.
std::string command_line_remedy(const Remedy& remedy);

/// Returns a finding in one line, with its remedy in the words of the command line.
std::string finding_line(const formats::Finding& finding);

}  // namespace tessera::cli
