#pragma once

#include <string>
#include <vector>

#include "formats/deepspeed/files.h"
#include "formats/deepspeed/partition.h"

namespace tessera::formats::deepspeed {

/// Checks that the files can be those of one save: as many ranks as the files say, one version of
/// DeepSpeed, and on all ranks the same shapes, counters of steps, groups of the optimizer and
/// scalars of its state; and in both files of a rank the same configuration. Reads these scalars'
/// bytes.
/// Throws: Error(corruption) naming the file of the rank that differs from rank 0;
/// Error(unsupported) for expert parallelism.
void require_one_save(const std::string& folder, const std::vector<const File*>& model,
                      const std::vector<const File*>& optimizer, int stage);

}  // namespace tessera::formats::deepspeed
