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
    link,  // a link to anything, even to a file: never followed
    folder,
    other,            // a pipe, a socket, a device
    checkpoint_file,  // a checkpoint of some format could own a file of this name
    in_own_folder,    // anything in a folder that holds files of the checkpoint
    unnamed_file,     // this checkpoint's format could own it, but the checkpoint does not name it
  };

  std::string name;
  Kind kind = Kind::file;
  std::uint64_t nbytes = 0;  // of a file
};

/// Returns whether a file of this name holds weights or an optimizer, from which a trainer would
/// resume (accelerate, the Trainer of transformers) or which a loader would take (TensorFlow, Flax,
/// llama.cpp), although it is no checkpoint file of Tessera.
bool holds_tensors(std::string_view name);

/// Returns the entries of a checkpoint's folder that are not files of the checkpoint, sorted by
/// name. Leaves out unfinished checkpoints of Tessera's writers, and their journals. `opened` lists
/// paths of files that belong to the checkpoint, whatever their names are, also in folders inside:
/// it leaves out these folders. Does not look into folders.
std::vector<ExtraEntry> list_extra_entries(const FileSystem& fs, const std::string& directory,
                                           Format format, const std::set<std::string>& opened);

/// Returns the folders below a checkpoint's folder that hold files of the checkpoint, as paths
/// relative to the checkpoint's folder. A folder comes after the folder that contains it. `opened`:
/// as for `list_extra_entries`.
std::set<std::string> list_own_folders(const std::string& directory,
                                       const std::set<std::string>& opened);

/// Returns the entries of a folder that could not belong to any checkpoint in the folder. Leaves
/// out every entry whose name some format could use, and unfinished checkpoints of Tessera's
/// writers with their journals. Opens only files whose names are those of journals.
std::vector<ExtraEntry> list_entries_beside_checkpoints(const FileSystem& fs,
                                                        const std::string& directory);

}  // namespace tessera::formats
