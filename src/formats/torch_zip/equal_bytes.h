#pragma once

#include <cstddef>

#include "formats/torch_zip/torch_zip_reader.h"

namespace tessera::formats::torch_zip {

/// Whether two tensors have the same dtype, shape and bytes; neither may be a part of a DTensor or
/// ShardedTensor. Compares only the stored checksums if both files have them. Otherwise reads both
/// tensors, with 1 MiB of memory.
bool are_equal(const TorchFileReader& a, std::size_t tensor_of_a, const TorchFileReader& b,
               std::size_t tensor_of_b);

}  // namespace tessera::formats::torch_zip
