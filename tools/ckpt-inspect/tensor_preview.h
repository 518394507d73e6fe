#pragma once

#include <string>
#include <vector>

#include "tessera/inspect/tensor_reader.h"

namespace tessera::cli {

/// Returns the outermost elements of a tensor as lines: rows of its last two dimensions, the first
/// and last few of each, with `…` for the elements between. Shows fewer if they do not fit into
/// `max_width` columns. If the tensor has more dimensions, shows the first such matrix; if it is
/// 0-d, its element. Rounds floats to four digits. Reads only the elements that it shows.
std::vector<std::string> preview_lines(const inspect::TensorReader& tensor, std::size_t max_width);

}  // namespace tessera::cli
