#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "formats/torch_zip/torch_archive.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_zip {

/// Adds the properties that torch gives to a tensor and that Tessera does not keep.
void note_flags(const TensorRecord& tensor, const std::string& name,
                std::vector<Simplification>& simplifications);

/// Adds the tensors that overlap another tensor in their storage: in the file, a change of one
/// would change the other. `tensors` has each tensor with its name in the checkpoint.
void note_shared_memory(const SavedObject& saved,
                        std::span<const std::pair<std::string, const TensorRecord*>> tensors,
                        std::vector<Simplification>& simplifications);

}  // namespace tessera::formats::torch_zip
