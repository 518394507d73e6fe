#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Opens a directory that PyTorch's package torch_checkpointing wrote. For each item, such as the
/// model, there is a file of each rank. `metadata.pkl` says how the ranks cut the items that can be
/// resharded. Names begin with the item: `model.`, `optimizer.`. Entries of several ranks are
/// joined as open_rank_files describes. `as_dict`: see OpenOptions. `fs` must outlive the reader.
/// The files: docs/formats/torch_checkpointing.md.
/// Throws: Error(corruption) naming a missing rank, or a tensor that `metadata.pkl` and a file
/// describe differently; Error(unsupported) for a form of file or a version that Tessera does not
/// know; and what `open_torch_zip` throws.
std::unique_ptr<CheckpointReader> open_torch_checkpointing(
    const FileSystem& fs, std::string path, const std::vector<std::string>& as_dict = {});

}  // namespace tessera::formats
