#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Opens a checkpoint that DeepSpeed's ZeRO saved (stage 1, 2 or 3): a folder `global_step<n>`, or
/// the folder above it whose file `latest` names one, or a universal checkpoint made of it. Reads
/// the pickles of all ranks, and no tensor bytes. Parameters are `model.<fqn>` with the fp32 master
/// weights, optimizer state is `optim.state.<fqn>.<name>`; each rank has a flat range of both.
/// Buffers and frozen parameters are `model.<fqn>` too. The files and how they are read:
/// docs/formats/deepspeed.md. `as_dict`: see OpenOptions. `fs` must outlive the reader.
/// Throws: Error(corruption) naming a missing rank, a parameter whose parts do not add up to its
/// shape, or files of different runs; Error(unsupported) for experts, and for a tensor whose parts
/// Tessera does not know how to join; and what `open_torch_zip` throws.
std::unique_ptr<CheckpointReader> open_deepspeed(const FileSystem& fs, std::string path,
                                                 const std::vector<std::string>& as_dict = {});

/// Starts a universal checkpoint, which DeepSpeed loads into ZeRO stage 1, 2 or 3 on any number of
/// ranks: a folder with `latest_universal` and `global_step<n>_universal`. The caller may write
/// blocks in any order. `values` is parallel to `contents.values`. The files do not keep kinds of
/// state, flat units and annotations.
/// Throws: Error(invalid_argument) unless every tensor is one piece and the key paths form one
/// tree; Error(unsupported) naming an entry for which DeepSpeed has no place;
/// Error(already_exists).
std::unique_ptr<CheckpointWriter> create_deepspeed(
    FileSystem& fs, std::string destination, CheckpointContents contents, std::vector<Value> values,
    OverwritePolicy overwrite = OverwritePolicy::refuse);

}  // namespace tessera::formats
