#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "runtime/fsdp/flat_param_contents.h"
#include "tessera/runtime/fsdp/unshard_params.h"

namespace tessera::fsdp {

/// The tensors of one flat parameter (FlatParamHandle) that unshard_params shows whole: its
/// parameters, or their gradients.
struct WholeTensors {
  at::Tensor flat;  // [padded numel]; undefined if this rank shows no whole tensors
  /// By parameter: its tensor or gradient now; undefined if it has none.
  std::vector<at::Tensor> shown;
};

/// Copies changes of whole tensors back: overwrites `shard` with this rank's shard of `whole`. The
/// source is this rank's `whole`; with `rank0_only` it is rank 0's. If the user gave a parameter
/// (or its `.grad`) another tensor than its view of `whole.flat`, this other tensor is first copied
/// into its place in `whole.flat`. If it has a wrong shape, the parameter keeps its old data.
/// Returns the index of the last such parameter; nullopt if none. Shape: `shard` [sharded_numel].
/// Collective with `rank0_only`; other ranks then need no extra memory. Throws: Error(io) if a peer
/// fails.
std::optional<std::size_t> write_back(const FlatParamContents& contents,
                                      const UnshardParamsOptions& options,
                                      at::Device compute_device, const WholeTensors& whole,
                                      const at::Tensor& shard);

}  // namespace tessera::fsdp
