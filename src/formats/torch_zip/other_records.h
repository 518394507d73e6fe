#pragma once

#include <optional>

#include "formats/torch_zip/torch_archive.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_zip {

/// Returns a note about the records of an archive from which Tessera reads no tensor and no value,
/// such as the code of TorchScript or its `_extra_files`. Returns nothing if there are no such
/// records. Leaves out the records that every torch.save writes besides the object.
std::optional<Finding> note_of_other_records(const TorchArchive& archive);

}  // namespace tessera::formats::torch_zip
