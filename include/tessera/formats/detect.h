#pragma once

#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Returns the format of the checkpoint at `path`. Judges a directory by the names of its files,
/// and a file by its name and its first bytes. Throws: Error(not_found) if the path does not exist;
/// Error(corruption) for an empty file, or for a checkpoint whose index is missing;
/// Error(unsupported), which names what was expected, for anything else that is no checkpoint.
Format detect_format(const FileSystem& fs, const std::string& path);

/// Checks that a writer may replace what is at `path`: nothing, an empty directory, or a checkpoint
/// (damaged or not). Each file must start with the bytes its name promises, so that Tessera never
/// replaces other people's files. Throws: Error(invalid_argument) for anything else, also if a file
/// beside a checkpoint's files is not part of it, and for safetensors files without an index that
/// do not form one checkpoint. `option`: how messages call the option that allows replacing.
void check_replaceable(const FileSystem& fs, const std::string& path, const std::string& option);

/// What the caller tells a reader, because the files of the checkpoint do not say it.
struct OpenOptions {
  std::string flat_layout_path{};  // JSON file with the layout of FSDP1's flat vectors; empty: none
  /// Classes, such as `argparse.Namespace`, whose objects are read as dicts of their attributes.
  /// The reader compares names as text and imports nothing. CheckpointContents::opened_classes
  /// counts the objects. If the state of such an object is not a dict, the reader refuses the
  /// object, as it does without this option.
  std::vector<std::string> as_dict{};
};

/// Throws Error(invalid_argument) if a class in `as_dict` is unused: no object of this class in any
/// of the `checkpoints` was read as a dict, so its name is perhaps mistyped. The error names the
/// first such class. `option`: how the message calls the option.
void require_classes_found(const std::vector<std::string>& as_dict,
                           std::initializer_list<const CheckpointContents*> checkpoints,
                           const std::string& option);

/// Throws Error(corruption) if `path` is, or links to, the staging path of unfinished work
/// (`DST.partial` with the file `DST.partial.journal` beside it), which could otherwise be taken
/// for a damaged checkpoint, or even for a valid one.
void require_no_work_in_progress(const FileSystem& fs, const std::string& path);

/// Opens a checkpoint of any format. `fs` must outlive the reader.
/// Throws: what `detect_format`, and `open_native` or the like, throw; Error(corruption) for a
/// checkpoint that a writer of Tessera has not finished.
std::unique_ptr<CheckpointReader> open_checkpoint(const FileSystem& fs, const std::string& path,
                                                  const OpenOptions& options = {});

/// Returns the quantization method (`fp8`, `gptq`) that `quantization_config` or
/// `compression_config` in `config.json` names for the model or a part of it. Empty if there is no
/// such method or file. If the file is not strict JSON, returns the first `quant_method` in its
/// text. `config.json` is in the checkpoint's folder, or beside its one file. Throws: Error if it
/// exists but cannot be read.
std::string read_quantization_method(const FileSystem& fs, const std::string& checkpoint_path);

}  // namespace tessera::formats
