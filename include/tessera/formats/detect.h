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
/// Error(corruption) for an empty file, or a checkpoint without its index; Error(unsupported) for
/// anything else, naming what was expected.
Format detect_format(const FileSystem& fs, const std::string& path);

/// Accepts a path that does not exist, an empty directory, or a checkpoint (damaged or not). Each
/// file must start with the bytes its name promises, so that other people's files are never
/// replaced. Throws: Error(invalid_argument) for anything else, also for foreign files among the
/// files of a checkpoint, and for safetensors files without an index that do not form one
/// checkpoint. `option`: the name of the option that allows replacing, for messages.
void check_replaceable(const FileSystem& fs, const std::string& path, const std::string& option);

/// Facts that the caller states, because the files of the checkpoint do not record them.
struct OpenOptions {
  std::string flat_layout_path{};  // JSON: the parameters in FSDP1's flat vectors; empty: not given
  /// Classes, such as `argparse.Namespace`, whose objects are read as dicts of their attributes.
  /// Names are compared as text; no class is looked up. CheckpointContents::opened_classes counts
  /// the objects. The reader refuses an object whose state is not a dict, as it does without this
  /// option.
  std::vector<std::string> as_dict{};
};

/// Throws Error(invalid_argument) naming the first class in `as_dict` that is unused: none of the
/// `checkpoints` has an object of the class that was read as a dict. The class name may be
/// mistyped. `option` is the option's name for the message.
void require_classes_found(const std::vector<std::string>& as_dict,
                           std::initializer_list<const CheckpointContents*> checkpoints,
                           const std::string& option);

/// Refuses a path that is, or links to, the staging path of unfinished work (`DST.partial` with the
/// file `DST.partial.journal` beside it). Such work may look like a damaged checkpoint, or even
/// like a valid one. Throws: Error(corruption).
void require_no_work_in_progress(const FileSystem& fs, const std::string& path);

/// Opens a checkpoint of any format. `fs` must outlive the reader.
/// Throws: what detect_format and the format's own `open_…` throw; Error(corruption) for a
/// checkpoint that a writer of Tessera has not finished.
std::unique_ptr<CheckpointReader> open_checkpoint(const FileSystem& fs, const std::string& path,
                                                  const OpenOptions& options = {});

/// Returns the quantization method (`fp8`, `gptq`) that `quantization_config` or
/// `compression_config` in `config.json` names for the model or a part of it; empty if it names
/// none, or cannot be read. If the file is not strict JSON, returns the first `quant_method` in its
/// text. The file is in the checkpoint's directory, or beside a checkpoint that is a file.
std::string read_quantization_method(const FileSystem& fs, const std::string& checkpoint_path);

}  // namespace tessera::formats
