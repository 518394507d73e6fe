#pragma once

#include <optional>

#include "formats/torch_zip/torch_archive.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_zip {

/// Returns a note about the records of an archive that no tensor and no value is read from, such as
/// the code of TorchScript or its `_extra_files`. Nothing if there are none. What every torch.save
/// writes beside the object is not told.
std::optional<Finding> note_of_other_records(const TorchArchive& archive);

}  // namespace tessera::formats::torch_zip
