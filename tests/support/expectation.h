#pragma once

#include <string>

#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::test {

/// Checks that a reader gives what `<checkpoint>.expect.json` says the writer held: the names,
/// dtypes and shapes, the digest of every tensor's bytes (aliases count as tensors), and every
/// value.
void expect_holds(const formats::CheckpointReader& reader, const std::string& expectation_path);

/// Returns a whole tensor's row-major bytes, put together from its pieces by the reader's own
/// order. Requires: boxes that cover the tensor.
std::string read_tensor(const formats::CheckpointReader& reader, std::size_t tensor_index);

}  // namespace tessera::test
