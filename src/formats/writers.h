#pragma once

#include <memory>
#include <string>
#include <vector>

#include "formats/staged_work.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/native.h"
#include "tessera/formats/safetensors.h"

namespace tessera::formats {

/// Returns what a checkpoint of that format is at a destination of that name.
DestinationKind destination_kind(Format format, const std::string& destination);

// The `create_...` of the formats, with a journal where that is wanted.

std::unique_ptr<CheckpointWriter> start_native(FileSystem& fs, std::string destination,
                                               CheckpointContents contents,
                                               const std::vector<Value>& values,
                                               const WorkOptions& work,
                                               const NativeWriteOptions& options);
std::unique_ptr<CheckpointWriter> start_safetensors(FileSystem& fs, std::string destination,
                                                    CheckpointContents contents,
                                                    const std::vector<Value>& values,
                                                    const WorkOptions& work,
                                                    const SafetensorsWriteOptions& options);
std::unique_ptr<CheckpointWriter> start_dcp(FileSystem& fs, std::string destination,
                                            CheckpointContents contents, std::vector<Value> values,
                                            const WorkOptions& work);
std::unique_ptr<CheckpointWriter> start_torch_zip(FileSystem& fs, std::string destination,
                                                  CheckpointContents contents,
                                                  const std::vector<Value>& values,
                                                  const WorkOptions& work);

// Each throws what its `start_...` would throw about what lies at the destination and beside it,
// and changes nothing.

void check_native(FileSystem& fs, const std::string& destination,
                  const CheckpointContents& contents, const WorkOptions& work);
void check_safetensors(FileSystem& fs, const std::string& destination,
                       const CheckpointContents& contents, const std::vector<Value>& values,
                       const WorkOptions& work, const SafetensorsWriteOptions& options);
void check_dcp(FileSystem& fs, const std::string& destination, const CheckpointContents& contents,
               const std::vector<Value>& values, const WorkOptions& work);

}  // namespace tessera::formats
