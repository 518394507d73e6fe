#pragma once

#include <optional>
#include <string>
#include <vector>

#include "formats/torch_zip/torch_archive.h"
#include "tessera/base/error.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_zip {

/// Says whether a saved object is one part of a checkpoint: what one rank of DeepSpeed, FSDP or
/// Megatron-LM saved, or one file of a model. The keys and classes in the object show this; for
/// some forms, only the file's name does. `path` is the path of the file, `num_local_tensors` the
/// member of Leaves.
std::optional<PartOfWhole> find_part(pickle::Object root, std::size_t num_local_tensors,
                                     const std::string& path);

/// Returns in words which form of checkpoint has parts with the `names` in a directory:
/// `DeepSpeed's files, one for each rank`. Returns nothing if the names belong to no known form.
std::optional<std::string> form_of_directory(const std::vector<std::string>& names);

/// Returns why a directory with Meta's files is no checkpoint: `consolidated.00.pth` alone is a
/// model in a file, and several are the tensor-parallel parts of one. Returns nothing if the
/// `names` in the directory have no such file.
std::optional<Error> refusal_of_meta(const std::string& directory,
                                     const std::vector<std::string>& names);

}  // namespace tessera::formats::torch_zip
