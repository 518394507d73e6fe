#pragma once

#include <optional>
#include <string>
#include <vector>

#include "formats/deepspeed/files.h"
#include "formats/deepspeed/partition.h"

namespace tessera::formats::deepspeed {

/// Checks that one save can have written the files, which belong to one model rank (see [Note:
/// Model ranks]):
/// - there are as many ranks as the files record, and one version of DeepSpeed;
/// - all ranks have the same shapes, ZeRO stage, step counters, parameter groups and scalars of the
///   optimizer's state (the bytes of these scalars are read);
/// - both files of a rank have the same configuration.
/// `num_model_ranks`: the number of model ranks of the whole checkpoint.
/// Throws: Error(corruption) naming the file that differs, or the folder if ranks are missing;
/// Error(unsupported) for expert parallelism.
void require_one_save(const std::string& folder, const std::vector<const File*>& model,
                      const std::vector<const File*>& optimizer, int stage,
                      std::size_t num_model_ranks = 1);
/// Checks that one save can have written the files of two model ranks: they have the same version
/// of DeepSpeed, parallel sizes, ZeRO stage, step counters, parameter groups and scalars of the
/// optimizer. Throws: Error(corruption) naming `model` or `optimizer`, whichever differs.
void require_one_save(const File& first_model, const File& first_optimizer, const File& model,
                      const File& optimizer, int stage);

/// What a note says about step counts that differ.
struct DifferingSteps {
  std::string expected;
  std::string found;
};
/// Compares how many steps the model states count (global_steps - skipped_steps) with the largest
/// step of the optimizer's state. If they differ, the files may be of two saves, or a run was
/// resumed without its optimizer's state. Returns nothing if they agree, or one has no count.
std::optional<DifferingSteps> differing_steps(const File& model, const File& optimizer, int stage);

}  // namespace tessera::formats::deepspeed
