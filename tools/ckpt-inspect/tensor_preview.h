#pragma once

#include <string>
#include <vector>

#include "tessera/inspect/tensor_reader.h"

namespace tessera::cli {

/// Returns the outermost elements of a tensor as lines: rows of its last two dimensions, the first
/// and last few of each, with `…` for what lies between; fewer where `max_width` columns do not
/// hold them. Of a tensor with more dimensions it is the first such matrix, of a 0-d tensor its one
/// element. Floats are rounded to four digits. Reads no more than it shows.
std::vector<std::string> preview_lines(const inspect::TensorReader& tensor, std::size_t max_width);

}  // namespace tessera::cli
