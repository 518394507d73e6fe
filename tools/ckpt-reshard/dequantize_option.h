#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "arithmetic/underflow_names.h"
#include "ckpt-reshard/move_options.h"
#include "tessera/base/dtype.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::cli {

/// What `--dequantize` has done.
struct Dequantized {
  DType dtype = DType::bfloat16;
  bool has_weights = false;        // whether the source has quantized weights, selected or not
  std::size_t num_weights = 0;     // quantized weights that --only selects
  std::size_t num_companions = 0;  // their scales and the like, which are left out
};

/// Returns a source with numbers in place of codes, as `--dequantize` asks; the same source without
/// this option. Its config.json is looked for at `path`, then in the folder of other files. Adds to
/// `problems` and `done`, and to `underflows` while it is read. Throws: UsageError for a dtype that
/// numbers of codes cannot have.
std::unique_ptr<formats::CheckpointReader> apply_dequantize(
    std::unique_ptr<formats::CheckpointReader> reader, const FileSystem& fs,
    const std::string& path, const MoveOptions& options, std::vector<formats::Finding>& problems,
    std::optional<Dequantized>& done,
    const std::shared_ptr<arithmetic::UnderflowNames>& underflows);

}  // namespace tessera::cli
