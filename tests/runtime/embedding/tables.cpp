#include "runtime/embedding/tables.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace tessera::test {
namespace {

const std::vector<std::string> kFeatures = {"user", "item", "city", "day", "unused"};

std::int64_t rows_of(const std::string& feature) {
  if (feature == "user") return 11;  // the smaller one of its tables
  if (feature == "item") return 11;
  if (feature == "city") return 3;
  return 23;
}

}  // namespace

std::vector<EmbeddingBagConfig> small_tables(const TableOptions& options) {
  const auto table = [&](std::string name, std::int64_t rows, std::int64_t columns,
                         std::vector<std::string> features) {
    EmbeddingBagConfig config;
    config.name = std::move(name);
    config.num_embeddings = rows;
    config.embedding_dim = columns;
    config.feature_names = std::move(features);
    config.pooling = options.pooling;
    config.dtype = options.dtype;
    config.init_fn = [rows, columns](at::Tensor weight) {
      weight.copy_(torch::arange(weight.numel())
                       .view(weight.sizes())
                       .remainder(17)
                       .add(9)
                       .div(static_cast<double>(20 + rows + columns)));
    };
    return config;
  };
  return {table("users", 11, 8, {"user", "item"}), table("cities", 3, 5, {"city"}),
          table("days", 23, 4, {"day"}), table("again", 20, 7, {"user"})};
}

EmbeddingBagCollection small_collection(const TableOptions& options) {
  EmbeddingBagCollectionOptions collection;
  collection.is_weighted = options.is_weighted;
  return EmbeddingBagCollection(small_tables(options), collection);
}

std::int64_t small_batch_size(int rank, int step) {
  constexpr std::int64_t kSizes[] = {3, 0, 5, 2};
  return kSizes[static_cast<std::size_t>((rank + step) % 4)];
}

KeyedJaggedTensor small_batch(int rank, int step, const TableOptions& options) {
  std::mt19937_64 engine(static_cast<std::uint64_t>(1000 * step + rank));
  const auto below = [&](std::int64_t end) {
    return std::uniform_int_distribution<std::int64_t>(0, end - 1)(engine);
  };
  std::vector<std::int64_t> lengths, values;
  for (const std::string& feature : kFeatures) {
    for (std::int64_t sample = 0; sample < small_batch_size(rank, step); ++sample) {
      lengths.push_back(below(5));
      for (std::int64_t i = 0; i < lengths.back(); ++i) values.push_back(below(rows_of(feature)));
    }
  }
  at::Tensor weights;
  if (options.is_weighted) {
    std::vector<float> list(values.size());
    for (float& each : list) each = 0.25F * static_cast<float>(1 + below(8));
    weights = torch::tensor(list);
  }
  return KeyedJaggedTensor::from_lengths(kFeatures, torch::tensor(values, at::kLong),
                                         torch::tensor(lengths, at::kLong), weights);
}

KeyedJaggedTensor joined(const std::vector<KeyedJaggedTensor>& batches) {
  std::vector<at::Tensor> values, lengths, weights;
  for (const std::string& key : batches.front().keys()) {
    for (const KeyedJaggedTensor& batch : batches) {
      const JaggedTensor bags = batch[key];
      values.push_back(bags.values());
      lengths.push_back(bags.lengths());
      if (bags.has_weights()) weights.push_back(bags.weights());
    }
  }
  return KeyedJaggedTensor::from_lengths(batches.front().keys(), torch::cat(values),
                                         torch::cat(lengths),
                                         weights.empty() ? at::Tensor() : torch::cat(weights));
}

const std::vector<PlanKind>& plan_kinds() {
  using enum TableSharding;
  static const std::vector<PlanKind> kinds = {
      {"data_parallel", {data_parallel}},
      {"table_wise", {table_wise}},
      {"column_wise", {column_wise}},
      {"row_wise", {row_wise}},
      {"table_row_wise", {table_row_wise}},
      {"table_column_wise", {table_column_wise}},
      {"grid", {grid}},
      {"mixed", {row_wise, data_parallel, column_wise, table_wise}}};
  return kinds;
}

const PlanKind& plan_kind(const std::string& name) {
  return *std::ranges::find(plan_kinds(), name, &PlanKind::name);
}

ModelWithTables model_with(std::shared_ptr<EmbeddingBagCollectionBase> tables) {
  ModelWithTables model(std::move(tables));
  const torch::NoGradGuard no_grad;
  model->top->weight.copy_(torch::arange(96).view({3, 32}).div(100.0));
  model->top->bias.fill_(0.25);
  return model;
}

TablePlan plan_of(const PlanKind& kind, int world_size) {
  TablePlan plan;
  plan.world_size = world_size;
  std::vector<int> backwards(static_cast<std::size_t>(world_size));
  std::iota(backwards.rbegin(), backwards.rend(), 0);
  const std::vector<int> host(backwards.begin(), backwards.begin() + (world_size + 1) / 2);
  int number = 0;
  for (const EmbeddingBagConfig& config : small_tables()) {
    TableRule rule;
    rule.sharding = kind.shardings[static_cast<std::size_t>(number) % kind.shardings.size()];
    switch (rule.sharding) {
      case TableSharding::table_wise:
        rule.ranks = {number % world_size};
        break;
      case TableSharding::table_row_wise:
      case TableSharding::table_column_wise:
        rule.ranks = host;
        break;
      case TableSharding::grid:
        rule.ranks = backwards;
        if (world_size % 2 != 0 && world_size > 1) rule.ranks.pop_back();
        rule.num_column_shards = world_size > 1 ? 2 : 1;
        break;
      case TableSharding::data_parallel:
        rule.ranks = backwards;
        std::ranges::sort(rule.ranks);
        break;
      default:
        rule.ranks = backwards;
    }
    plan.tables[config.name] = std::move(rule);
    ++number;
  }
  return plan;
}

std::shared_ptr<ShardedEmbeddingBagCollection> sharded_collection(const dist::Mesh& mesh,
                                                                  const std::string& plan,
                                                                  const ShardOptions& options) {
  return shard(small_collection(), plan_of(plan_kind(plan), mesh.world_size()), mesh, options);
}

at::Tensor longs(const std::vector<std::int64_t>& values) {
  return torch::tensor(values, at::kLong);
}

at::Tensor loss_of(const at::Tensor& pooled) {
  return (pooled * pooled + 0.5 * pooled).sum();
}

std::vector<embedding::FusedOptimizer> fused_optimizers() {
  return {embedding::Sgd{.lr = 0.05, .weight_decay = 0.01},
          embedding::Adagrad{.lr = 0.05, .eps = 1e-6, .max_gradient = 0.8},
          embedding::RowWiseAdagrad{.lr = 0.05, .eps = 1e-6, .weight_decay = 0.02},
          embedding::Adam{.lr = 0.01, .eps = 1e-6, .weight_decay = 0.01},
          embedding::RowWiseAdam{.lr = 0.01, .eps = 1e-6}};
}

}  // namespace tessera::test
