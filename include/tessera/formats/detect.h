#pragma once

#include <memory>
#include <string>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// Returns the format of what lies at `path`, from names in a directory or a file's first bytes.
/// Throws: Error(not_found) where there is nothing; Error(corruption) on an empty file, or a
/// checkpoint that lacks its index; Error(unsupported) on anything else, saying what was looked
/// for.
Format detect_format(const FileSystem& fs, const std::string& path);

/// Passes where nothing is, an empty directory, or a checkpoint, also a damaged one: each file must
/// begin as one of its name does. Throws: Error(invalid_argument) where something else would be
/// lost, be it beside a checkpoint's files in their directory, and where safetensors files without
/// an index are no checkpoint together; `option` is what asked to replace it.
void check_replaceable(const FileSystem& fs, const std::string& path, const std::string& option);

/// What helps to open a checkpoint.
struct OpenOptions {
  std::string flat_layout_path{};  // of what bare flat vectors are made; empty: not given
};

/// Refuses work in progress: it may look like a damaged checkpoint, or worse, like a sound one.
/// Throws: Error(corruption) where a journal lies beside what `path` leads to.
void require_no_work_in_progress(const FileSystem& fs, const std::string& path);

/// Opens a checkpoint of any format. `fs` must outlive the reader.
/// Throws: what detect_format and the format's own `open_…` throw; Error(corruption) on work in
/// progress that a journal lies beside.
std::unique_ptr<CheckpointReader> open_checkpoint(const FileSystem& fs, const std::string& path,
                                                  const OpenOptions& options = {});

}  // namespace tessera::formats
