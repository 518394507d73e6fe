#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "arithmetic/rounding_losses.h"
#include "ckpt-reshard/move_options.h"
#include "tessera/base/dtype.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::cli {

/// The result of `--dequantize`.
struct Dequantized {
  DType dtype = DType::bfloat16;
  bool has_weights = false;        // whether the source has quantized weights, selected or not
  std::size_t num_weights = 0;     // quantized weights that --only selects
  std::size_t num_companions = 0;  // their scales and the like, which are left out
};

/// Returns a text for everything that `--dequantize` reads beside the tensors of the checkpoints at
/// `paths`: config.json says what the codes mean. `--resume` and `--part` compare it. Empty without
/// `--dequantize`.
std::string dequantize_identity(const FileSystem& fs, const std::vector<std::string>& paths,
                                const MoveOptions& options);

/// Returns the quantization method that config.json names for the checkpoint at `path`; empty if
/// none. Looks for config.json beside the checkpoint, then in the folder of `--extra-files-from`.
/// Throws: as formats::read_quantization_method.
std::string quantization_method(const FileSystem& fs, const std::string& path,
                                const MoveOptions& options);

/// With `--dequantize`, returns a reader that shows numbers instead of the codes of quantized
/// weights; otherwise returns the same reader. `paths`: of the checkpoint, or of the sources of a
/// merge. Looks for config.json at each, then in the folder of `--extra-files-from`. Adds to
/// `problems` and `done`. Reading elements later adds to `losses`. Throws: UsageError for a dtype
/// to which codes cannot be converted.
std::unique_ptr<formats::CheckpointReader> apply_dequantize(
    std::unique_ptr<formats::CheckpointReader> reader, const FileSystem& fs,
    const std::vector<std::string>& paths, const MoveOptions& options,
    std::vector<formats::Finding>& problems, std::optional<Dequantized>& done,
    const std::shared_ptr<arithmetic::RoundingLosses>& losses);

}  // namespace tessera::cli
