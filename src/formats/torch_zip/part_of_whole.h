#pragma once

#include <optional>
#include <string>
#include <vector>

#include "formats/torch_zip/torch_archive.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_zip {

/// Returns a description of the part if a saved object is only one part of a checkpoint: what one
/// rank of DeepSpeed, FSDP or Megatron-LM saved, or one file of a model. Otherwise returns nothing.
/// Judges by the keys and classes in the object, and sometimes by the file's name. `path`: of the
/// file. `num_local_tensors`: see Leaves.
std::optional<PartOfWhole> find_part(pickle::Object root, std::size_t num_local_tensors,
                                     const std::string& path);

/// Returns a description of the part if `path` is the model of a Megatron run, and the optimizer
/// and its float32 weights are in the file `distrib_optim.pt` beside it. Otherwise returns nothing.
std::optional<PartOfWhole> part_by_optimizer_beside(const FileSystem& fs, const std::string& path);

/// Describes the files in a directory by their `names`: `DeepSpeed, files of each rank`.
/// Returns nothing if the names belong to no known kind of checkpoint.
std::optional<std::string> form_of_directory(const std::vector<std::string>& names);

/// Returns the error for a directory with Meta's files `consolidated.00.pth`, …. One such file
/// alone is a whole model, so the user must give the path of the file. Several are tensor-parallel
/// parts, which Tessera does not join. Returns nothing if `names` has no such file.
std::optional<Error> refusal_of_meta(const std::string& directory,
                                     const std::vector<std::string>& names);

}  // namespace tessera::formats::torch_zip
