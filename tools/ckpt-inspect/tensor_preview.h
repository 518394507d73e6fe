#pragma once

#include <string>
#include <vector>

#include "tessera/inspect/tensor_reader.h"

namespace tessera::cli {

/// Returns the outermost elements of a tensor as lines: rows of its last two dimensions, the first
/// and last three of each, with `…` for the elements between. If lines exceed `max_width` columns,
/// shows fewer columns, but at least two. More dimensions: the first such matrix. 0-d: the element.
/// No elements: no lines. Rounds floats to four digits. Reads only the elements that it shows.
std::vector<std::string> preview_lines(const inspect::TensorReader& tensor, std::size_t max_width);

}  // namespace tessera::cli
