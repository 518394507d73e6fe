#pragma once

#include <string>

namespace tessera::formats {

/// Whether a file of that name makes the files beside it a checkpoint, in any format: `index.h5`,
/// `.metadata`, `metadata.pkl`, or an index of Hugging Face. It is written last and removed first.
bool is_index_name(const std::string& name);

}  // namespace tessera::formats
