#pragma once

#include <string>
#include <utility>
#include <vector>

namespace tessera::cli {

/// Returns the name and a description of each format that the tools know, for help texts.
std::vector<std::pair<std::string, std::string>> format_rows();

/// Returns a text for the help: which format a destination gets without `--to`, by the suffix of
/// its name.
std::string default_format_rule();

}  // namespace tessera::cli
