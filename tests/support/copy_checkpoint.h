#pragma once

#include "tessera/formats/checkpoint.h"

namespace tessera::test {

/// Fills every piece of `writer` with the bytes that `source` has for it, block by block on
/// `num_threads` threads, and commits. Requires: `source` has each of the writer's tensors.
void copy_checkpoint(const formats::CheckpointReader& source, formats::CheckpointWriter& writer,
                     int num_threads = 1);

}  // namespace tessera::test
