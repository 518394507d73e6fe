#pragma once

#include <optional>
#include <string>

#include "formats/torch_zip/torch_archive.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_zip {

/// Says whether a saved object is one part of a checkpoint: what one rank of DeepSpeed, FSDP or
/// Megatron-LM saved, or one file of a model. The keys and classes in it say so; of some forms only
/// the file's name does. `path`: of the file.
/// `num_local_tensors`: of Leaves.
std::optional<PartOfWhole> find_part(pickle::Object root, std::size_t num_local_tensors,
                                     const std::string& path);

/// Returns the form of the checkpoint whose parts have such names in a directory, in words; nothing
/// if no form is known by them: `DeepSpeed's files, one for each rank`.
std::optional<std::string> form_of_directory(const std::vector<std::string>& names);

}  // namespace tessera::formats::torch_zip
