#pragma once

#include "formats/deepspeed/files.h"
#include "formats/torch_files/entry_reader.h"

namespace tessera::formats::deepspeed {

using torch_files::are_equal;
using torch_files::EntryReader;
using torch_files::in_dict_order;
using torch_files::Path;
using torch_files::refuse;
using torch_files::text_keys;

/// Returns the rules by which DeepSpeed's files differ from other files of torch.save. `records`
/// lists DeepSpeed's classes whose objects hold only data; they are read as dicts.
const torch_files::Family& family();

}  // namespace tessera::formats::deepspeed
