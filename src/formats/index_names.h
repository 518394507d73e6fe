#pragma once

#include <string>

namespace tessera::formats {

/// Whether a file of that name makes the files beside it a checkpoint, in any format: `index.h5`,
/// `.metadata`, `metadata.pkl`, or an index of Hugging Face. It is written last and removed first.
bool is_index_name(const std::string& name);

/// Whether Tessera writes files of that name for a format whose files cannot be read without their
/// index. A folder of such files without an index is no checkpoint. A lone `model.safetensors`
/// needs no index.
bool needs_index(const std::string& name);

}  // namespace tessera::formats
