#pragma once

#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats {

/// A driver of a format whose checkpoints are directories with an index that names their files.
class IndexedFormatDriver : public FormatDriver {
 public:
  /// Returns the name of the index in the checkpoint's directory.
  virtual std::string_view index_name() const = 0;

  /// Returns the index, the files that it names, and empty files that the format may own (older
  /// PyTorch makes a file even for a rank that saves nothing). `opened`: the files that the index
  /// names; if it is empty, opens the checkpoint to find these files. If that fails, returns
  /// every file that the format may own; but an Error(io) is thrown.
  std::vector<std::string> own_files(const FileSystem& fs, const std::string& directory,
                                     const std::vector<std::string>& names,
                                     const std::set<std::string>& opened) const override;
  /// Throws Error(invalid_argument) for the first file that has a name of this format but belongs
  /// to another save: replacing the checkpoint would remove that file.
  void require_one_checkpoint(const FileSystem& fs, const std::string& directory,
                              const std::vector<std::string>& names,
                              const std::string& option) const override;
};

}  // namespace tessera::formats
