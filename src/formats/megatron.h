#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Opens a checkpoint that Megatron-LM saved with `--ckpt-format torch`. `path` is a folder
/// `iter_<n>` with a folder `mp_rank_<t>[_<p>][_<e>]` for each rank, or the folder above it, whose
/// `latest_checkpointed_iteration.txt` names the newest `iter_<n>`. Reads the pickles of all ranks,
/// and few bytes of tensors. Weights are `model.<name>`, in which layers and experts have their
/// numbers in the whole model. Optimizer state is `optim.state.<name>.<kind>`. The files and how
/// they are read: docs/formats/megatron.md. `as_dict`: see OpenOptions. `fs` must outlive the
/// reader.
/// Throws:
/// - Error(corruption) naming a missing rank, or files of different saves
/// - Error(unsupported) for kinds of parallelism that Tessera does not read
/// - what `open_torch_zip` throws
std::unique_ptr<CheckpointReader> open_megatron(const FileSystem& fs, std::string path,
                                                const std::vector<std::string>& as_dict = {});

}  // namespace tessera::formats
