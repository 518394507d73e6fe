#pragma once

#include <torch/nn/module.h>

namespace tessera {

/// What becomes of buffers that differ from rank to rank, such as the running statistics of
/// BatchNorm, which sees each rank's own rows.
enum class BufferSync {
  rank0,  // all ranks take those of rank 0
  mean,   // floating-point buffers become the mean over the ranks, others those of rank 0
};

/// Makes the buffers of a model the same on all ranks of its mesh. Call it before an evaluation or
/// a save: without it each rank evaluates with its own, and `save` takes those of rank 0, under
/// every strategy. Collective. Requires: no pass is open. Source: distribute_bn of timm
/// (github.com/huggingface/pytorch-image-models).
void sync_buffers(torch::nn::Module& model, BufferSync how = BufferSync::rank0);

}  // namespace tessera
