#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Opens a directory in which each rank has saved its state dict with torch.save, as verl and SkyRL
/// do, with FSDP1, FSDP2 or tensor parallelism. Reads the pickles of all files. Reads tensor bytes
/// only to compare copies that have no checksums. A DTensor or a ShardedTensor becomes one tensor
/// with a piece for each rank. An ordinary tensor or a value becomes one entry if it is equal on
/// all ranks. If it differs, the lowest rank's entry keeps the name, and other entries are named
/// `per_rank.<rank>.<name>`. All names begin with the name of their files: `model.`, `optim.`.
/// `as_dict`: see OpenOptions. `fs` must outlive the reader. The files: docs/formats/rank_files.md.
/// Throws: Error(corruption) naming a missing rank, a file of another rank, or tensors of different
/// shape or dtype; Error(unsupported) for a placement other than Shard and Replicate; and what
/// `open_torch_zip` throws.
std::unique_ptr<CheckpointReader> open_rank_files(const FileSystem& fs, std::string path,
                                                  const std::vector<std::string>& as_dict = {});

}  // namespace tessera::formats
