#pragma once

#include <string>

#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::test {

/// Checks that a reader returns what the writer had, as `<checkpoint>.expect.json` records it:
/// names, dtypes and shapes, and the digest of every tensor's bytes (aliases count as tensors). If
/// the file has the key `values`, also checks every value; then, for each value under the key
/// `refused`, read_value must throw Error(unsupported) with the given words.
void expect_holds(const formats::CheckpointReader& reader, const std::string& expectation_path);

}  // namespace tessera::test
