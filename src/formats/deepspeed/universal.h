#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::deepspeed {

/// Opens a universal checkpoint: a folder with model states, and with a file for each parameter and
/// each kind of its state.
///
///     zero/<fqn>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
///     zero/optimizer_state.pt        groups, loss scale; from ZeRO stage 3 also the step
///
/// If Tessera wrote the checkpoint, `optimizer_state.pt` also says what its source did not have
/// ([Note: What Tessera adds], universal_members.h).
/// Throws: Error(corruption) naming a parameter without weights, or a tensor of another size;
/// Error(unsupported) naming a file of a layer or an expert, or a folder in `zero` that belongs to
/// no parameter; and what `open_torch_zip` throws.
std::unique_ptr<CheckpointReader> open_universal(const FileSystem& fs, std::string path,
                                                 std::string folder,
                                                 const std::vector<std::string>& as_dict);

}  // namespace tessera::formats::deepspeed
