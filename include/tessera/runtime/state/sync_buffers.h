#pragma once

#include <torch/nn/module.h>

namespace tessera {

/// What to do with buffers that differ between ranks, such as the running statistics of BatchNorm,
/// which sees only each rank's own rows.
enum class BufferSync {
  rank0,  // all ranks get the buffers of rank 0
  mean,   // floating-point buffers become the mean over the ranks; others: as `rank0`
};

/// Makes the buffers of a model equal on all ranks of its mesh. Call it before an evaluation or a
/// save: without it, each rank evaluates with its own buffers, and `save` saves those of rank 0.
/// Collective. Requires: no pass is open. Source: distribute_bn of timm
/// (github.com/huggingface/pytorch-image-models).
void sync_buffers(torch::nn::Module& model, BufferSync how = BufferSync::rank0);

}  // namespace tessera
