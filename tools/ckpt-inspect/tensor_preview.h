#pragma once

#include <string>
#include <vector>

#include "tessera/inspect/tensor_reader.h"

namespace tessera::cli {

/// Returns the outermost elements of a tensor as lines: rows of its last two dimensions, the first
/// and last few of each, with `…` for those between; fewer if they do not fit into `max_width`
/// columns. Shows the first such matrix of a tensor with more dimensions, the element of a 0-d
/// tensor. Rounds floats to four digits. Reads only the elements that it shows.
std::vector<std::string> preview_lines(const inspect::TensorReader& tensor, std::size_t max_width);

}  // namespace tessera::cli
