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
/// Error(unsupported) for expert parallelism. `num_model_ranks`: see [Note: Model ranks]; the files
/// are those of one of them.
void require_one_save(const std::string& folder, const std::vector<const File*>& model,
                      const std::vector<const File*>& optimizer, int stage,
                      std::size_t num_model_ranks = 1);
/// Checks that the files of two model ranks can be of one save: one version of DeepSpeed, the same
/// counters of steps, and the same groups and scalars of the optimizer.
/// Throws: Error(corruption) naming the file of the second one.
void require_one_save(const File& first_model, const File& first_optimizer, const File& model,
                      const File& optimizer, int stage);

}  // namespace tessera::formats::deepspeed
