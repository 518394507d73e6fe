#pragma once

#include <string>
#include <vector>

#include "tessera/inspect/tensor_reader.h"

namespace tessera::cli {

/// Returns the corner elements of a tensor as lines: its last two dimensions, the first and last
/// three positions of each, with `…` between them. With more dimensions, shows the first such
/// matrix. A 0-d tensor has one line, an empty tensor none. If lines exceed `max_width`, shows
/// fewer columns, but at least two. Rounds floats to four digits. Reads only what it shows.
std::vector<std::string> preview_lines(const inspect::TensorReader& tensor, std::size_t max_width);

}  // namespace tessera::cli
