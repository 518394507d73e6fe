#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "formats/staging/journal.h"
#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/shared_contents.h"

namespace tessera::formats::dcp {

/// Implements parts.h (each rank writes its own part) for DCP. Each rank computes the places of all
/// chunks and values from the contents and the values, so that it needs no file of another rank.

std::unique_ptr<CheckpointWriter> create_part(FileSystem& fs, std::string directory,
                                              CheckpointContents contents,
                                              std::vector<Value> values, int rank);

/// Throws Error(corruption) naming a file that is missing or has the wrong size.
void require_parts(const FileSystem& fs, const std::string& directory, CheckpointContents contents,
                   const std::vector<Value>& values);

void finish_parts(FileSystem& fs, const std::string& directory, CheckpointContents contents,
                  const std::vector<Value>& values);

/// The files of a DCP checkpoint that lies inside a larger checkpoint, before they are written.
struct PreparedFiles {
  std::set<std::string> names;
  /// Returns a writer that writes the files into an existing directory, `.metadata` last.
  /// `journal` may be null. Call this function only once.
  std::function<std::unique_ptr<CheckpointWriter>(FileSystem& fs, std::string directory,
                                                  Journal* journal)>
      start;
};

/// Decides what each file will hold, and writes nothing. `destination`: the path in messages.
/// Throws: what `create_dcp` throws about the contents and the values.
PreparedFiles prepare_files(const std::string& destination, SharedContents contents,
                            std::vector<Value> values);

}  // namespace tessera::formats::dcp
