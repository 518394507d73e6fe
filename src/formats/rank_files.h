#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Opens a directory in which each rank has saved its state dict with torch.save: verl, SkyRL and
/// others, with FSDP1, FSDP2 and tensor parallelism. Reads the pickles of all files, and no tensor
/// bytes, except to compare copies that have no checksums. A DTensor or a ShardedTensor becomes one
/// tensor with a piece for each rank. An ordinary tensor or a value that is equal on all ranks is
/// one entry; of others the one of the lowest rank keeps the name, and the others get the name
/// `per_rank.<rank>.<name>`. Names begin with what the files are called: `model.`, `optim.`.
/// `as_dict`: see OpenOptions. `fs` must outlive the reader. What is on the disk:
/// docs/formats/rank_files.md.
/// Throws: Error(corruption) naming a missing rank, a file of another rank, or tensors of different
/// shape or dtype; Error(unsupported) for a placement other than Shard and Replicate; and what
/// `open_torch_zip` throws.
std::unique_ptr<CheckpointReader> open_rank_files(const FileSystem& fs, std::string path,
                                                  const std::vector<std::string>& as_dict = {});

}  // namespace tessera::formats
