#pragma once

#include <string>

#include "tessera/base/file_system.h"
#include "tessera/base/value.h"

namespace tessera::arithmetic {

/// The member under which a config.json is given the content of ModelOpt's `hf_quant_config.json`.
inline constexpr const char* kModelOptConfigMember = "hf_quant_config.json";

/// Returns the content of `config.json` beside a checkpoint; None if there is no such file. If
/// ModelOpt's `hf_quant_config.json` is there, its content is added as the member
/// kModelOptConfigMember. `Infinity` and `NaN`, which Python writes into JSON, become None. Throws:
/// Error(corruption) if a file is not JSON.
Value read_model_config(const FileSystem& fs, const std::string& checkpoint_path);
/// Returns a digest of the bytes of both files; an empty text if there are none.
std::string model_config_digest(const FileSystem& fs, const std::string& checkpoint_path);

}  // namespace tessera::arithmetic
