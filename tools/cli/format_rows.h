#pragma once

#include <string>
#include <utility>
#include <vector>

namespace tessera::cli {

/// Returns the name and a description of each format that the tools know, for help texts.
std::vector<std::pair<std::string, std::string>> format_rows();

/// Returns a text for the help that says which format a destination gets without `--to`: the suffix
/// of its name decides.
std::string default_format_rule();

}  // namespace tessera::cli
