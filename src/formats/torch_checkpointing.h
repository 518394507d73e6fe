#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Opens a directory that PyTorch's package torch_checkpointing wrote: a file of each rank for each
/// item, and `metadata.pkl`, which says how items that can be resharded are cut. Names begin with
/// the item: `model.`, `optimizer.`. What open_rank_files says of entries holds here too.
/// `as_dict`: see OpenOptions. `fs` must outlive the reader. What is on the disk:
/// docs/formats/torch_checkpointing.md.
/// Throws: Error(corruption) naming a missing rank, or a tensor that `metadata.pkl` and a file
/// describe differently; Error(unsupported) for a form of file or a version that Tessera does not
/// know; and what `open_torch_zip` throws.
std::unique_ptr<CheckpointReader> open_torch_checkpointing(
    const FileSystem& fs, std::string path, const std::vector<std::string>& as_dict = {});

}  // namespace tessera::formats
