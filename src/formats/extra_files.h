#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/format.h"

namespace tessera::formats {

/// An entry of a checkpoint's folder that is no part of the checkpoint.
struct ExtraEntry {
  enum class Kind {
    file,
    link,  // also to a file: never followed
    folder,
    other,            // a pipe, a socket, a device
    checkpoint_file,  // has the name of some format's file, so it could be taken for one
    unnamed_file,     // has the name of a file of this checkpoint, which does not name it
  };

  std::string name;
  Kind kind = Kind::file;
  std::uint64_t nbytes = 0;  // of a file
};

/// Returns the entries of the folder of a checkpoint that are none of its files, by name. Leaves
/// out what Tessera's writers left there: unfinished checkpoints, journals. `opened` are paths of
/// files that are the checkpoint's whatever their names. Opens no folder within.
std::vector<ExtraEntry> list_extra_entries(const FileSystem& fs, const std::string& directory,
                                           Format format, const std::set<std::string>& opened);

/// Returns the same for a folder whose checkpoint, if it has one, is not asked for: leaves out all
/// files that have the name of some format's.
std::vector<ExtraEntry> list_entries_beside_checkpoints(const FileSystem& fs,
                                                        const std::string& directory);

}  // namespace tessera::formats
