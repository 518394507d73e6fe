#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::dcp {

/// Implements parts.h (each rank writes its own part) for DCP. Each rank computes the places of all
/// items from the contents and the values, so that it needs no file of another rank.

std::unique_ptr<CheckpointWriter> create_part(FileSystem& fs, std::string directory,
                                              CheckpointContents contents,
                                              std::vector<Value> values, int rank);

/// Throws Error(corruption) naming a file that is missing or has the wrong size.
void require_parts(const FileSystem& fs, const std::string& directory, CheckpointContents contents,
                   const std::vector<Value>& values);

void finish_parts(FileSystem& fs, const std::string& directory, CheckpointContents contents,
                  const std::vector<Value>& values);

}  // namespace tessera::formats::dcp
