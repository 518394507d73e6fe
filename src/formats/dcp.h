#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Opens a checkpoint that torch.distributed.checkpoint (DCP) saved: a directory with `.metadata`
/// and `.distcp` files. Reads `.metadata`, and all values if the state dict was saved without
/// flattening. Reads all else when the caller asks for it. `path` may also be a file
/// `__<rank>.metadata`, which each rank writes in a save with `use_collectives=False`; the
/// checkpoint then consists of what this rank saved. `fs` must outlive the reader. The layout on
/// disk: docs/formats/dcp.md.
/// Throws: Error(not_found) if there is no `.metadata`; Error(corruption); Error(unsupported)
/// naming a foreign function or class, or an extension of DCP (compression, encryption).
std::unique_ptr<CheckpointReader> open_dcp(const FileSystem& fs, std::string path);

/// Opens a checkpoint as open_dcp does, and reads objects of the classes in `as_dict` as dicts
/// (OpenOptions::as_dict). Reads all values immediately, in order to count those objects.
std::unique_ptr<CheckpointReader> open_dcp_with_classes(const FileSystem& fs, std::string path,
                                                        std::vector<std::string> as_dict);

/// Opens the values of a DCP checkpoint for whose names in `.metadata` `keeps` returns true. Leaves
/// out all else, and opens no file for it. Otherwise as open_dcp_with_classes.
std::unique_ptr<CheckpointReader> open_dcp_values(
    const FileSystem& fs, std::string path, std::vector<std::string> as_dict,
    const std::function<bool(std::string_view)>& keeps);

/// Starts a DCP checkpoint that PyTorch's default planner can load. It has a file
/// `__<rank>_0.distcp` for each rank that holds something, and `.metadata`, which is written last.
/// `values` is parallel to `contents.values`. If a piece has replicas, only one is written: the one
/// on the rank that has the least to write so far. Positions that a list lacks become None, because
/// PyTorch cannot load the list without them. Throws: Error(invalid_argument) if the contents hold
/// aliases, a piece that is not a Box, different boxes at the same offsets, or a key path that does
/// not spell its name; Error(unsupported) if a list lacks too many positions, two keys of a dict
/// become one text, or a value cannot be pickled; Error(already_exists) as `overwrite` says.
std::unique_ptr<CheckpointWriter> create_dcp(FileSystem& fs, std::string destination,
                                             CheckpointContents contents, std::vector<Value> values,
                                             OverwritePolicy overwrite = OverwritePolicy::refuse);

}  // namespace tessera::formats
