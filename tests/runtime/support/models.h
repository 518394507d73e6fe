#pragma once

#include <torch/torch.h>

#include "tessera/runtime/recompute/recompute.h"

namespace tessera::test {

/// Layers of odd sizes, so that parameters do not divide evenly over the ranks.
struct MlpImpl : torch::nn::Module {
  MlpImpl() {
    up = register_module("up", torch::nn::Linear(7, 13));
    middle = register_module("middle", torch::nn::Linear(13, 11));
    down = register_module("down", torch::nn::Linear(11, 3));
  }
  at::Tensor forward(at::Tensor x) {
    return down->forward(torch::tanh(middle->forward(torch::relu(up->forward(x)))));
  }
  torch::nn::Linear up{nullptr}, middle{nullptr}, down{nullptr};
};
TORCH_MODULE(Mlp);

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int width) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 3 * width));
    down = register_module("down", torch::nn::Linear(3 * width, width));
  }
  at::Tensor forward(at::Tensor x) {
    return x + down->forward(torch::gelu(up->forward(norm->forward(x))));
  }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

/// A projection to the vocabulary with the weight of the embedding (tied).
struct TiedHeadImpl : torch::nn::Module {
  explicit TiedHeadImpl(at::Tensor embedding) {
    weight = register_parameter("weight", std::move(embedding));
  }
  at::Tensor forward(const at::Tensor& x) { return torch::matmul(x, weight.t()); }
  at::Tensor weight;
};
TORCH_MODULE(TiedHead);

/// Blocks between an embedding and a head that share their weight.
struct TransformerImpl : torch::nn::Module {
  static constexpr int kVocabulary = 19;
  explicit TransformerImpl(int num_blocks = 3, int width = 10) {
    embedding = register_module("embedding", torch::nn::Embedding(kVocabulary, width));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < num_blocks; ++i) blocks->push_back(Block(width));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    head = register_module("head", TiedHead(embedding->weight));
  }
  at::Tensor forward(at::Tensor ids) {
    at::Tensor x = embedding->forward(ids);
    for (const auto& block : *blocks) {
      const auto run = std::dynamic_pointer_cast<BlockImpl>(block);
      x = recomputation ? recompute(*recomputation, run, x) : run->forward(x);
    }
    return head->forward(norm->forward(x));
  }
  std::optional<RecomputeOptions> recomputation;
  torch::nn::Embedding embedding{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  TiedHead head{nullptr};
};
TORCH_MODULE(Transformer);

}  // namespace tessera::test
