#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include "formats/torch_zip/torch_archive.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_zip {

/// Adds to `simplifications` the properties of a tensor that Tessera does not keep, such as
/// requires_grad.
void note_flags(const TensorRecord& tensor, const std::string& name,
                std::vector<Simplification>& simplifications);

/// Of each group of tensors that overlap in a storage, adds all but the first to `simplifications`.
/// (In PyTorch, a write to one can change another; Tessera reads them as separate tensors.)
/// `tensors`: each tensor with its name in the checkpoint.
void note_shared_memory(const SavedObject& saved,
                        std::span<const std::pair<std::string, const TensorRecord*>> tensors,
                        std::vector<Simplification>& simplifications);

}  // namespace tessera::formats::torch_zip
