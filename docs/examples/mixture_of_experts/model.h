#pragma once

#include <torch/torch.h>

#include <vector>

namespace example {

struct MoeConfig {
  std::int64_t vocabulary = 256;
  std::int64_t width = 64;
  std::int64_t num_layers = 2;
  std::int64_t num_experts = 8;  // of each layer
  std::int64_t sequence = 32;
};

/// A small network. It gets only the tokens that are routed to it. Shape: [tokens, width] in and
/// out.
struct ExpertImpl : torch::nn::Module {
  explicit ExpertImpl(std::int64_t width) {
    up = register_module("up", torch::nn::Linear(width, 2 * width));
    down = register_module("down", torch::nn::Linear(2 * width, width));
  }
  at::Tensor forward(const at::Tensor& x) { return down->forward(torch::gelu(up->forward(x))); }
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Expert);

/// Sends each token to the expert to which the router gives the highest score (Fedus et al., Switch
/// Transformers, https://arxiv.org/abs/2101.03961). Experts without a token are not called. The set
/// of called experts therefore differs between ranks. Shape: [batch, sequence, width] in and out.
struct ExpertsImpl : torch::nn::Module {
  explicit ExpertsImpl(const MoeConfig& config) {
    using namespace torch::nn;
    norm = register_module("norm", LayerNorm(LayerNormOptions({config.width})));
    router = register_module("router",
                             Linear(LinearOptions(config.width, config.num_experts).bias(false)));
    experts = register_module("experts", ModuleList());
    for (std::int64_t i = 0; i < config.num_experts; ++i) {
      experts->push_back(Expert(config.width));
    }
  }

  at::Tensor forward(const at::Tensor& input) {
    const at::Tensor x = norm->forward(input).flatten(0, 1);
    const auto [weight, choice] = router->forward(x).softmax(-1).max(-1);
    at::Tensor y = torch::zeros_like(x);
    num_used = 0;
    for (std::size_t i = 0; i < experts->size(); ++i) {
      const at::Tensor tokens = choice.eq(static_cast<std::int64_t>(i)).nonzero().flatten();
      if (tokens.numel() == 0) continue;
      ++num_used;
      y = y.index_add(0, tokens, experts[i]->as<Expert>()->forward(x.index_select(0, tokens)));
    }
    return input + (y * weight.unsqueeze(-1)).view_as(input);
  }

  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear router{nullptr};
  torch::nn::ModuleList experts{nullptr};
  int num_used = 0;  // experts that had tokens in the last forward
};
TORCH_MODULE(Experts);

/// A recurrent net with a mixture of experts behind each layer. Shape: ids [batch, sequence],
/// int64; logits [batch, sequence, vocabulary].
struct MoeModelImpl : torch::nn::Module {
  explicit MoeModelImpl(const MoeConfig& config) {
    using namespace torch::nn;
    embedding = register_module("embedding", Embedding(config.vocabulary, config.width));
    for (std::int64_t i = 0; i < config.num_layers; ++i) {
      const std::string number = std::to_string(i);
      mixers.push_back(register_module(
          "mixer" + number, GRU(GRUOptions(config.width, config.width).batch_first(true))));
      mixtures.push_back(register_module("experts" + number, Experts(config)));
    }
    head = register_module("head", Linear(config.width, config.vocabulary));
  }

  at::Tensor forward(const at::Tensor& ids) {
    at::Tensor x = embedding->forward(ids);
    for (std::size_t i = 0; i < mixers.size(); ++i) {
      x = mixtures[i]->forward(x + std::get<0>(mixers[i]->forward(x)));
    }
    return head->forward(x);
  }

  torch::nn::Embedding embedding{nullptr};
  std::vector<torch::nn::GRU> mixers;
  std::vector<Experts> mixtures;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(MoeModel);

}  // namespace example
