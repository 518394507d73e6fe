#pragma once

#include <cstddef>

#include "formats/torch_zip/torch_zip_reader.h"
#include "tessera/base/value.h"

namespace tessera::formats::rank_files {

/// Whether two ordinary tensors have the same dtype, shape and bytes. Compares stored checksums if
/// both files have them, else reads both tensors, in a MiB of memory.
bool are_equal(const torch_zip::TorchFileReader& a, std::size_t tensor_of_a,
               const torch_zip::TorchFileReader& b, std::size_t tensor_of_b);

/// Whether two values are equal down to the bits of their floats: 0.0 and -0.0 are not.
bool have_equal_bits(const Value& a, const Value& b);

}  // namespace tessera::formats::rank_files
