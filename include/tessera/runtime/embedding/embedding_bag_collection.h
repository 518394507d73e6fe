#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

#include "tessera/runtime/embedding/fused_optimizer.h"
#include "tessera/runtime/embedding/jagged_tensor.h"

namespace tessera {

/// What becomes of the rows of a bag: their sum, or that divided by the number of ids.
enum class Pooling { sum, mean };

/// An embedding table. What torchrec calls EmbeddingBagConfig.
struct EmbeddingBagConfig {
  std::string name;  // without dots
  std::int64_t num_embeddings = 0;
  std::int64_t embedding_dim = 0;
  /// Keys of the batch that are looked up here. A key may be looked up in several tables.
  std::vector<std::string> feature_names{};
  Pooling pooling = Pooling::sum;
  at::ScalarType dtype = at::kFloat;  // float32, float16 or bfloat16
  /// Gives the weight, or a shard of it, its first values. Default: uniform between plus and minus
  /// `1 / sqrt(num_embeddings)`.
  std::function<void(at::Tensor weight)> init_fn{};
};

/// What a collection does with batches, and where its tables lie.
struct EmbeddingBagCollectionOptions {
  /// Whether rows are multiplied by the batch's weights before they are pooled. Pooling::mean
  /// divides by the number of ids all the same.
  bool is_weighted = false;
  /// What a feature is that tables look up and the batch does not have: an error, or empty bags.
  enum class MissingFeature { refuse, empty } missing_feature = MissingFeature::refuse;
  /// `meta`: tables without memory, for `shard`, which makes shards alone.
  at::Device device = at::kCPU;
};

/// What a collection looks up and gives out, without the tables themselves. Immutable.
class TableSet {
 public:
  /// Throws: Error(invalid_argument) naming the table and what is wrong with it.
  TableSet(std::vector<EmbeddingBagConfig> configs, const EmbeddingBagCollectionOptions& options);

  const std::vector<EmbeddingBagConfig>& configs() const { return configs_; }
  const EmbeddingBagCollectionOptions& options() const { return options_; }
  /// A column block of the output: a feature of a table.
  struct Output {
    std::size_t table;
    std::string feature;
    std::int64_t column;
  };
  /// Table by table, and of each table feature by feature.
  const std::vector<Output>& outputs() const { return outputs_; }
  const std::vector<std::int64_t>& output_widths() const { return output_widths_; }
  std::int64_t output_width() const { return output_width_; }  // of all
  /// Names the outputs: as the feature, with `@table` behind it where several tables look it up.
  KeyedTensor named(at::Tensor pooled) const;

 private:
  std::vector<EmbeddingBagConfig> configs_;
  EmbeddingBagCollectionOptions options_;
  std::vector<Output> outputs_;
  std::vector<std::string> output_names_;
  std::vector<std::int64_t> output_widths_;
  std::int64_t output_width_ = 0;
};

/// What all collections of embedding tables have in common. Each table's weight is the parameter of
/// an empty module, `embedding_bags.<table>.weight`, sharded or not, so that the framework's own
/// walk finds it under one name. Source: github.com/pytorch/torchrec, change of D38190302.
class EmbeddingBagCollectionBase : public torch::nn::Module {
 public:
  /// Looks up bags of ids and pools each. Keys of the batch that no table looks up are left alone.
  /// Shape: `[batch, sum of the outputs' widths]`, float32. Throws: Error(invalid_argument) naming
  /// table, feature, sample and position of an id out of range, a feature that is not in the batch,
  /// or weights that are missing or not asked for.
  virtual KeyedTensor forward(const KeyedJaggedTensor& batch) = 0;

  const TableSet& tables() const { return tables_; }
  /// Returns a table's weight, or this rank's shard of it.
  at::Tensor weight(const std::string& table) const;

 protected:
  explicit EmbeddingBagCollectionBase(TableSet tables);
  /// Makes `weight` the parameter `embedding_bags.<table>.weight`. Requires: called once for each
  /// table.
  void register_weight(const std::string& table, at::Tensor weight);

 private:
  TableSet tables_;
  std::shared_ptr<torch::nn::Module> embedding_bags_;
};

/// The tables of this process alone, by plain autograd; the reference for all others.
class EmbeddingBagCollection final : public EmbeddingBagCollectionBase {
 public:
  explicit EmbeddingBagCollection(std::vector<EmbeddingBagConfig> tables,
                                  const EmbeddingBagCollectionOptions& options = {});
  KeyedTensor forward(const KeyedJaggedTensor& batch) override;
};

}  // namespace tessera
