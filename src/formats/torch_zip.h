#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Opens a file that `torch.save` or `torch.jit.save` wrote: a zip archive; of PyTorch before
/// 1.6, a sequence of pickles (a stream); of PyTorch 0.1, a tar archive. Reads no tensor bytes.
/// One rank holds everything; each tensor is one piece. Names are the nested keys joined by dots,
/// list positions as numbers. A tensor or a value that was saved without a dict is named `tensor`
/// or `value`. If the same elements in the same shape have several names, the first name in byte
/// order is the tensor and the others are aliases. Views are read in row-major order. `fs` must
/// outlive the reader. The layout on disk: docs/formats/torch_zip.md. Anything that is neither a
/// dense tensor nor a plain value, such as an object of a class, becomes a value for which
/// `read_value` throws. Throws: Error(not_found); Error(corruption); Error(io);
/// Error(unsupported) for two entries of one flattened name, or for another kind of archive or
/// pickle.
std::unique_ptr<CheckpointReader> open_torch_zip(const FileSystem& fs, std::string path);

/// Opens a file as open_torch_zip does, and reads objects of the classes in `as_dict` as dicts
/// (OpenOptions::as_dict).
std::unique_ptr<CheckpointReader> open_torch_zip_with_classes(
    const FileSystem& fs, std::string path, const std::vector<std::string>& as_dict);

/// Starts a file that `torch.load(…, weights_only=True)` can load, also with `mmap=True`: nested
/// dicts and lists that the key paths describe. Each tensor is contiguous in a storage of its own;
/// an alias is another tensor over the same storage. Blocks may be written in any order. `values`
/// is parallel to `contents.values`. Kinds of state, flat units and annotations are left out.
/// Throws: Error(invalid_argument) unless every tensor is one piece and the key paths form one
/// tree; Error(unsupported) naming a value that cannot be pickled, or anything that would make the
/// file unreadable, such as two entries of one flattened name; Error(already_exists).
std::unique_ptr<CheckpointWriter> create_torch_zip(
    FileSystem& fs, std::string destination, CheckpointContents contents, std::vector<Value> values,
    OverwritePolicy overwrite = OverwritePolicy::refuse);

}  // namespace tessera::formats
