#pragma once

#include <string>
#include <utility>
#include <vector>

namespace tessera::cli {

/// Returns the formats that the tools know, for help texts: the name of each and what it is.
std::vector<std::pair<std::string, std::string>> format_rows();

}  // namespace tessera::cli
