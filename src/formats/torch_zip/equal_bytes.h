#pragma once

#include <cstddef>

#include "formats/torch_zip/torch_zip_reader.h"

namespace tessera::formats::torch_zip {

/// Whether two ordinary tensors have the same dtype, shape and bytes. Compares stored checksums if
/// both files have them, else reads both tensors, in a MiB of memory.
bool are_equal(const TorchFileReader& a, std::size_t tensor_of_a, const TorchFileReader& b,
               std::size_t tensor_of_b);

}  // namespace tessera::formats::torch_zip
