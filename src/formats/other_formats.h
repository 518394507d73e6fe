#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats {

/// A format whose files are in a directory.
struct FormatInDirectory {
  const FormatDriver* driver;
  std::string file;         // one of its files
  bool is_complete = true;  // false: the format's main file, such as an index, is missing

  /// `rank-00000.h5 (native, without index.h5)`
  std::string in_words() const;
};

/// Returns the other formats of which a directory has files, by the names. Leaves out the files of
/// `known`. `opened`: the paths of files that belong to `known` (FormatDriver::own_files).
std::vector<FormatInDirectory> other_formats_in(const FileSystem& fs,
                                                const DirectoryListing& directory,
                                                const FormatDriver& known,
                                                const std::set<std::string>& opened);

/// Returns the error for a directory that `known` refuses, although this driver recognises it best,
/// and that also has files of other formats: the error names the files of all formats, and has the
/// kind of `known`'s own error. Returns nothing for any other directory.
std::optional<Error> refusal_of_mixture(const FileSystem& fs, const DirectoryListing& directory,
                                        const FormatDriver& known);

/// Returns a note for users who open a checkpoint whose directory also has files of other formats,
/// which are not read. Returns nothing if there are no such files, or the checkpoint is no
/// directory.
std::optional<Finding> note_of_other_formats(const FileSystem& fs, const CheckpointReader& reader);

}  // namespace tessera::formats
