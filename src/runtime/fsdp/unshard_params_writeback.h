#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <optional>
#include <vector>

#include "runtime/fsdp/flat_param_contents.h"
#include "tessera/runtime/fsdp/unshard_params.h"

namespace tessera::fsdp {

/// The tensors of one handle that unshard_params has shown whole: parameters, or their gradients.
struct WholeTensors {
  at::Tensor flat;                // [padded numel]; undefined if this rank shows none
  std::vector<at::Tensor> shown;  // by parameter, as they are now; undefined if none
};

/// Replaces `shard` by this rank's shard of what was written to `whole` on this rank, or with
/// `rank0_only` on rank 0. Also takes tensors that were assigned in place of the views of
/// `whole.flat`. Returns the last parameter whose tensor has another shape; this parameter keeps
/// its old data. Shape: `shard` [sharded_numel]. Collective with `rank0_only`, and without extra
/// memory on other ranks. Throws: Error(io) if a peer fails.
std::optional<std::size_t> write_back(const FlatParamContents& contents,
                                      const UnshardParamsOptions& options,
                                      at::Device compute_device, const WholeTensors& whole,
                                      const at::Tensor& shard);

}  // namespace tessera::fsdp
