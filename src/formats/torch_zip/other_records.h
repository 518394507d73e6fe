#pragma once

#include <optional>
#include <string>

#include "formats/torch_zip/torch_archive.h"
#include "formats/torch_zip/torch_tar.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_zip {

/// Returns a note about the records of an archive from which Tessera reads neither a tensor nor a
/// value, such as the code of TorchScript or its `_extra_files`; nothing if there are none. Does
/// not count the records that every torch.save writes besides the object.
std::optional<Finding> note_of_other_records(const TorchArchive& archive);

/// Returns a note about the members of a tar archive that PyTorch 0.1 did not write. Returns
/// nothing if there are none. `path`: of the archive.
std::optional<Finding> note_of_other_members(const TorchTar& archive, const std::string& path);

}  // namespace tessera::formats::torch_zip
