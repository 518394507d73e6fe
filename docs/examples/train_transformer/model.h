#pragma once

#include <torch/torch.h>

#include <optional>

#include "tessera/runtime/recompute/recompute.h"

namespace example {

struct Config {
  std::int64_t vocabulary = 256;
  std::int64_t width = 128;
  std::int64_t num_layers = 4;
  std::int64_t num_heads = 4;
  std::int64_t sequence = 64;
  std::optional<tessera::RecomputeOptions> recompute{};
};

/// One layer of a decoder: attention to this and earlier positions, then an MLP.
/// Shape: [batch, sequence, width] in and out.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const Config& config) : num_heads(config.num_heads) {
    using namespace torch::nn;
    const std::int64_t width = config.width;
    norm1 = register_module("norm1", LayerNorm(LayerNormOptions({width})));
    qkv = register_module("qkv", Linear(width, 3 * width));
    proj = register_module("proj", Linear(width, width));
    norm2 = register_module("norm2", LayerNorm(LayerNormOptions({width})));
    up = register_module("up", Linear(width, 4 * width));
    down = register_module("down", Linear(4 * width, width));
  }

  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor x = input + attend(norm1->forward(input));
    return x + down->forward(torch::gelu(up->forward(norm2->forward(x))));
  }

  at::Tensor attend(const at::Tensor& x) {
    const std::int64_t batch = x.size(0);
    const std::int64_t sequence = x.size(1);
    const at::Tensor heads =
        qkv->forward(x).view({batch, sequence, 3, num_heads, -1}).permute({2, 0, 3, 1, 4});
    const at::Tensor mixed = at::scaled_dot_product_attention(heads[0], heads[1], heads[2], {}, 0.0,
                                                              /*is_causal=*/true);
    return proj->forward(mixed.transpose(1, 2).reshape({batch, sequence, -1}));
  }

  std::int64_t num_heads;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, proj{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

/// A decoder-only transformer. Shape: ids [batch, sequence], int64; logits [batch, sequence,
/// vocabulary].
struct TransformerImpl : torch::nn::Module {
  explicit TransformerImpl(const Config& its_config) : config(its_config) {
    using namespace torch::nn;
    embedding = register_module("embedding", Embedding(config.vocabulary, config.width));
    position = register_parameter("position", torch::zeros({config.sequence, config.width}));
    blocks = register_module("blocks", ModuleList());
    for (std::int64_t i = 0; i < config.num_layers; ++i) blocks->push_back(Block(config));
    norm = register_module("norm", LayerNorm(LayerNormOptions({config.width})));
    head =
        register_module("head", Linear(LinearOptions(config.width, config.vocabulary).bias(false)));
  }

  at::Tensor forward(const at::Tensor& ids) {
    at::Tensor x = embedding->forward(ids) + position.narrow(0, 0, ids.size(1));
    for (const auto& each : *blocks) {
      const auto block = std::dynamic_pointer_cast<BlockImpl>(each);
      x = config.recompute ? tessera::recompute(*config.recompute, block, x) : block->forward(x);
    }
    return head->forward(norm->forward(x));
  }

  Config config;
  torch::nn::Embedding embedding{nullptr};
  at::Tensor position;
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Transformer);

}  // namespace example
