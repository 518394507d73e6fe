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

  /// Returns the index itself, the files that it names, and empty ones (older PyTorch makes a file
  /// for a rank that saves nothing). If the index cannot be read, all that the format may own.
  /// Opens the checkpoint unless `opened` has files.
  std::vector<std::string> own_files(const FileSystem& fs, const std::string& directory,
                                     const std::vector<std::string>& names,
                                     const std::set<std::string>& opened) const override;
  /// Refuses the first file that the format may own, but the checkpoint does not: a file of another
  /// save, which a replacement would remove.
  void require_one_checkpoint(const FileSystem& fs, const std::string& directory,
                              const std::vector<std::string>& names,
                              const std::string& option) const override;
};

}  // namespace tessera::formats
