#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "formats/torch_files/file.h"

namespace tessera::formats::deepspeed {

using torch_files::Entry;
using torch_files::File;

/// The names of a checkpoint's files in its directory.
struct FileNames {
  std::vector<std::string> model;      // by rank; in ZeRO stages 1 and 2 often only rank 0's
  std::vector<std::string> optimizer;  // by rank
};

/// A file with the weights of one layer of a pipeline.
struct LayerFile {
  std::size_t layer = 0;
  std::size_t tensor = 0;  // tensor rank
  std::string name;
};

/// The names of the files of a checkpoint with tensor or pipeline parallelism. [Note: Model ranks]
/// The model is cut into parts. A part's index is its model rank (DeepSpeed: `mp_rank`). Model rank
/// `m` is tensor rank `m % tensor size` of pipeline stage `m / tensor size`. ZeRO cuts the
/// parameters of each part among data ranks.
struct ParallelFiles {
  /// By model rank: one file, or in ZeRO stage 3 one for each data rank.
  std::vector<std::vector<std::string>> model;
  std::vector<std::vector<std::string>> optimizer;  // by model rank, then by data rank
  std::vector<LayerFile> layers;                    // sorted; empty without a pipeline
};

/// Returns whether DeepSpeed writes files with names like `name`.
bool is_file_name(std::string_view name);
/// Returns whether any of these names is of optimizer states of ZeRO (`*_optim_states.pt`).
bool are_of_zero(const std::vector<std::string>& names);
/// Returns whether a file can have this name: not empty, no slash or zero byte, not `.` or `..`.
bool is_plain_name(std::string_view name);
/// Returns whether a folder with these names is a universal checkpoint, such as ds_to_universal.py
/// makes.
bool are_universal(const std::vector<std::string>& names);
/// Returns whether Tessera's writer of universal checkpoints writes a `.pt` file with such a path,
/// relative to the checkpoint's folder: `global_step7_universal/zero/up.weight/fp32.pt`.
bool is_path_of_universal(std::string_view path);
/// Returns whether a folder with these names is a checkpoint with tensor or pipeline parallelism.
bool are_of_several_model_ranks(const std::vector<std::string>& names);
/// Throws Error(unsupported) if one of the files is of tensor, pipeline or expert parallelism.
void require_zero_alone(const std::vector<std::string>& names, const std::string& directory);
/// For ZeRO stage 3: throws Error(corruption) naming the first rank with only one of its two files
/// (model states, optimizer states). Requires: the numbers of these files differ.
[[noreturn]] void refuse_other_ranks(const std::string& directory, std::size_t num_models,
                                     std::size_t num_optimizers);
/// Returns the files of a checkpoint with ZeRO alone. Throws: Error(corruption) naming a missing
/// rank (not if it is the last); Error(unsupported) for other parallelism, or two files of a rank.
FileNames find_files(const std::vector<std::string>& names, const std::string& directory);
/// Returns the files of tensor or pipeline parallelism. Throws: Error(corruption) naming a missing
/// rank (as in find_files); Error(unsupported) for experts, or two files of a rank or layer.
ParallelFiles find_parallel_files(const std::vector<std::string>& names,
                                  const std::string& directory);
/// Whether the names are those of a checkpoint with tensor or pipeline parallelism, but without
/// ZeRO.
bool are_without_zero(const std::vector<std::string>& names);
/// Returns the files of a checkpoint without ZeRO. `optimizer` is empty, because the checkpoint has
/// no `*_optim_states.pt`. Throws: what `find_parallel_files` throws.
ParallelFiles find_files_without_zero(const std::vector<std::string>& names,
                                      const std::string& directory);
/// Returns the model states of a universal checkpoint that was made of several model ranks, in the
/// order of `ParallelFiles::model`. Throws: what `find_parallel_files` throws.
std::vector<std::vector<std::string>> find_model_ranks(const std::vector<std::string>& names,
                                                       const std::string& directory);

/// Throws Error(corruption) if torch.save wrote the file under the name of another rank's file.
void require_own_name(const File& file);

}  // namespace tessera::formats::deepspeed
