#pragma once

#include <torch/torch.h>

#include <memory>

#include "dlrm/clicks.h"
#include "tessera/tessera.h"

namespace example {

/// A deep learning recommendation model (Naumov et al., https://arxiv.org/abs/1906.00091).
/// Embedding tables turn the ids into vectors, and the MLP `bottom` turns the numbers into one
/// vector. The MLP `top` gets all vectors and the product of each pair.
struct DlrmImpl : torch::nn::Module {
  static constexpr std::int64_t kWidth = 16;

  explicit DlrmImpl(std::shared_ptr<tessera::EmbeddingBagCollectionBase> its_tables)
      : tables(register_module("tables", std::move(its_tables))),
        bottom(register_module(
            "bottom", torch::nn::Sequential(torch::nn::Linear(Clicks::kNumDense, 64),
                                            torch::nn::ReLU(), torch::nn::Linear(64, kWidth)))),
        top(register_module(
            "top", torch::nn::Sequential(torch::nn::Linear(num_products(), 64), torch::nn::ReLU(),
                                         torch::nn::Linear(64, 1)))) {}

  /// Returns logits. Shape: `[samples]`.
  at::Tensor forward(const at::Tensor& dense, const tessera::KeyedTensor& pooled) {
    const std::int64_t num_samples = dense.size(0);
    const at::Tensor below = bottom->forward(dense);
    const at::Tensor vectors =
        torch::cat({below.unsqueeze(1), pooled.values().view({num_samples, -1, kWidth})}, 1);
    const std::int64_t num_vectors = vectors.size(1);
    const at::Tensor pairs = torch::tril_indices(num_vectors, num_vectors, -1);
    const at::Tensor products = torch::bmm(vectors, vectors.transpose(1, 2))
                                    .index({torch::indexing::Slice(), pairs[0], pairs[1]});
    return top->forward(torch::cat({vectors.flatten(1), products}, 1)).squeeze(1);
  }

  static std::int64_t num_products() {
    const auto num_vectors = static_cast<std::int64_t>(Clicks::features().size()) + 1;
    return num_vectors * kWidth + num_vectors * (num_vectors - 1) / 2;
  }

  std::shared_ptr<tessera::EmbeddingBagCollectionBase> tables;
  torch::nn::Sequential bottom{nullptr};
  torch::nn::Sequential top{nullptr};
};
TORCH_MODULE(Dlrm);

/// One table for each feature.
inline std::vector<tessera::EmbeddingBagConfig> tables_of_clicks() {
  std::vector<tessera::EmbeddingBagConfig> tables;
  for (const Clicks::Feature& feature : Clicks::features()) {
    tessera::EmbeddingBagConfig table;
    table.name = feature.name;
    table.num_embeddings = feature.num_ids;
    table.embedding_dim = DlrmImpl::kWidth;
    table.feature_names = {feature.name};
    table.pooling = tessera::Pooling::mean;
    table.init_fn = [](at::Tensor weight) { weight.uniform_(-0.05, 0.05); };
    tables.push_back(std::move(table));
  }
  return tables;
}

}  // namespace example
