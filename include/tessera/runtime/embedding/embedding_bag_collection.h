#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <string>
#include <vector>

#include "tessera/embedding_kernels/fused_optimizer.h"
#include "tessera/runtime/embedding/jagged_tensor.h"

namespace tessera {

/// How the rows of a bag are combined: their sum, or the sum divided by the number of ids in the
/// bag.
enum class Pooling { sum, mean };

/// An embedding table. What torchrec calls EmbeddingBagConfig.
struct EmbeddingBagConfig {
  std::string name;                 // without dots
  std::int64_t num_embeddings = 0;  // rows
  std::int64_t embedding_dim = 0;   // columns
  /// The keys of a batch whose ids this table looks up. Several tables may look up the same key.
  std::vector<std::string> feature_names{};
  Pooling pooling = Pooling::sum;
  at::ScalarType dtype = at::kFloat;  // float32, float16 or bfloat16
  /// Fills the weight, or one shard of it, with initial values. Empty: uniform between plus and
  /// minus 1 / sqrt(num_embeddings).
  std::function<void(at::Tensor weight)> init_fn{};
};

/// How a collection treats batches, and where its tables are.
struct EmbeddingBagCollectionOptions {
  /// Whether to multiply rows by the batch's weights before pooling. Pooling::mean divides by the
  /// number of ids in either case.
  bool is_weighted = false;
  /// What to do if the batch lacks a feature of a table: throw, or treat the feature's bags as
  /// empty.
  enum class MissingFeature { refuse, empty } missing_feature = MissingFeature::refuse;
  /// Where the weights are. With `meta`, they have no memory until `shard` allocates this rank's.
  at::Device device = at::kCPU;
};

/// The configuration of a collection's tables, without their weights. Immutable.
class TableSet {
 public:
  /// Throws: Error(invalid_argument) naming a table whose configuration is invalid, and why.
  TableSet(std::vector<EmbeddingBagConfig> configs, const EmbeddingBagCollectionOptions& options);

  const std::vector<EmbeddingBagConfig>& configs() const { return configs_; }
  const EmbeddingBagCollectionOptions& options() const { return options_; }
  /// A range of the output's columns: one feature of one table.
  struct Output {
    std::size_t table;
    std::string feature;
    std::int64_t column;  // first column
  };
  /// Returns the outputs: table by table, and within a table in the order of `feature_names`.
  const std::vector<Output>& outputs() const { return outputs_; }
  const std::vector<std::int64_t>& output_widths() const { return output_widths_; }
  std::int64_t output_width() const { return output_width_; }  // sum of the widths
  /// Returns `pooled` with a key for each output: the feature, or `feature@table` if several tables
  /// look up this feature.
  KeyedTensor named(at::Tensor pooled) const;

 private:
  std::vector<EmbeddingBagConfig> configs_;
  EmbeddingBagCollectionOptions options_;
  std::vector<Output> outputs_;
  std::vector<std::string> output_names_;
  std::vector<std::int64_t> output_widths_;
  std::int64_t output_width_ = 0;
};

/// Base class of all embedding collections. Each table's weight is a parameter called
/// `embedding_bags.<table>.weight`, sharded or not. Each table is a child module that only holds
/// this parameter, so that libtorch itself lists it under this name. Source:
/// github.com/pytorch/torchrec, change D38190302.
class EmbeddingBagCollectionBase : public torch::nn::Module {
 public:
  /// Looks up the rows of each bag's ids and pools them. Ignores keys that no table looks up.
  /// Returns float32 `[batch, sum of the outputs' widths]`. Collective if sharded. Throws:
  /// Error(invalid_argument) for a missing feature, missing or unexpected weights, or an id out of
  /// range, naming its place (EmbeddingBagCollection: only if ids are on the CPU).
  virtual KeyedTensor forward(const KeyedJaggedTensor& batch) = 0;

  const TableSet& tables() const { return tables_; }
  /// Returns a table's weight (if sharded, this rank's shard). Throws: Error(not_found) if unknown.
  at::Tensor weight(const std::string& table) const;

 protected:
  explicit EmbeddingBagCollectionBase(TableSet tables);
  /// Registers `weight` as the parameter `embedding_bags.<table>.weight`. Requires: called once for
  /// each table.
  void register_weight(const std::string& table, at::Tensor weight);

 private:
  TableSet tables_;
  std::shared_ptr<torch::nn::Module> embedding_bags_;
};

/// Unsharded tables with plain autograd. The other collections are tested against this one.
class EmbeddingBagCollection final : public EmbeddingBagCollectionBase {
 public:
  explicit EmbeddingBagCollection(std::vector<EmbeddingBagConfig> tables,
                                  const EmbeddingBagCollectionOptions& options = {});
  KeyedTensor forward(const KeyedJaggedTensor& batch) override;
};

}  // namespace tessera
