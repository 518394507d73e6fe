#pragma once

#include <string>
#include <utility>
#include <vector>

namespace tessera::cli {

/// Returns the formats that the tools know, for help texts: the name of each and what it is.
std::vector<std::pair<std::string, std::string>> format_rows();

/// Returns in words which format a destination without `--to` gets: by the suffix of its name.
std::string default_format_rule();

}  // namespace tessera::cli
