#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::dcp {

// What parts.h promises, for this format. Where everything lies follows from contents and values,
// so that no rank needs to know another's file.

std::unique_ptr<CheckpointWriter> create_part(FileSystem& fs, std::string directory,
                                              CheckpointContents contents,
                                              std::vector<Value> values, int rank);

/// Throws Error(corruption) naming a file that is missing or of another size than it must have.
void require_parts(const FileSystem& fs, const std::string& directory, CheckpointContents contents,
                   const std::vector<Value>& values);

void finish_parts(FileSystem& fs, const std::string& directory, CheckpointContents contents,
                  const std::vector<Value>& values);

}  // namespace tessera::formats::dcp
