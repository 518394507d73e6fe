#pragma once

#include <string>

#include "tessera/base/error.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::cli {

/// Returns what the user can do about an error, with the options of the command line; empty for
/// Action::none.
std::string command_line_remedy(const Remedy& remedy);

/// Returns a finding as one line, with the option that may help.
std::string finding_line(const formats::Finding& finding);

}  // namespace tessera::cli
