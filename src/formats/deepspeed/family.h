#pragma once

#include "formats/deepspeed/files.h"
#include "formats/torch_files/entry_reader.h"

namespace tessera::formats::deepspeed {

using torch_files::are_equal;
using torch_files::EntryReader;
using torch_files::Path;
using torch_files::refuse;
using torch_files::text_keys;

/// Returns what is special about DeepSpeed's files. Its records are the classes of which DeepSpeed
/// saves objects that are only numbers.
const torch_files::Family& family();

}  // namespace tessera::formats::deepspeed
