#pragma once

#include <string>

#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::test {

/// Checks that a reader gives what `<checkpoint>.expect.json` says the writer held: the names,
/// dtypes and shapes, the digest of every tensor's bytes (aliases count as tensors), and every
/// value. The values under its key `refused`, if it has one, must be refused with those words.
void expect_holds(const formats::CheckpointReader& reader, const std::string& expectation_path);

}  // namespace tessera::test
