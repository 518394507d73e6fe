// Times a step of embedding tables: forward, backward and update. Prints one line of JSON.
//   train_tables OPTIMIZER TABLES ROWS COLUMNS BATCH POOLING uniform|zipf THREADS STEPS
// OPTIMIZER: sgd, row_wise_adagrad; BATCH: of all ranks; under torchrun tables are sharded by
// table.
#include <torch/torch.h>

#include <chrono>
#include <cmath>
#include <cstdio>
#include <string>

#include "device.h"
#include "tessera/tessera.h"

namespace {

std::vector<tessera::EmbeddingBagConfig> make_tables(std::int64_t number, std::int64_t rows,
                                                     std::int64_t columns) {
  std::vector<tessera::EmbeddingBagConfig> tables;
  for (std::int64_t i = 0; i < number; ++i) {
    tessera::EmbeddingBagConfig& table = tables.emplace_back();
    table.name = "t" + std::to_string(i);
    table.num_embeddings = rows;
    table.embedding_dim = columns;
    table.feature_names = {"f" + std::to_string(i)};
  }
  return tables;
}

/// `zipf`: the chance of id k falls as 1 / (k + 1).
tessera::KeyedJaggedTensor make_batch(std::int64_t num_features, std::int64_t rows,
                                      std::int64_t samples, std::int64_t pooling,
                                      const std::string& distribution) {
  const std::int64_t num_ids = num_features * samples * pooling;
  at::Tensor ids;
  if (distribution == "zipf") {
    const at::Tensor uniform = torch::rand({num_ids}, at::kDouble);
    ids = (uniform * std::log(static_cast<double>(rows))).exp().to(at::kLong) - 1;
    ids = ids.clamp(0, rows - 1);
  } else {
    ids = torch::randint(rows, {num_ids}, at::kLong);
  }
  std::vector<std::string> keys;
  for (std::int64_t i = 0; i < num_features; ++i) keys.push_back("f" + std::to_string(i));
  return tessera::KeyedJaggedTensor::from_lengths(
      keys, ids, torch::full({num_features * samples}, pooling, at::kLong));
}

/// Returns how many different rows a batch looks up, in all tables together.
std::int64_t num_touched_rows(const tessera::KeyedJaggedTensor& batch) {
  std::int64_t number = 0;
  for (const auto& [key, bags] : batch.to_dict()) {
    number += std::get<0>(at::_unique(bags.values())).numel();
  }
  return number;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 10) {
    std::fprintf(stderr,
                 "usage: train_tables OPTIMIZER TABLES ROWS COLUMNS BATCH POOLING uniform|zipf "
                 "THREADS STEPS\n");
    return 2;
  }
  const std::string name = argv[1];
  const std::int64_t num_tables = std::stoll(argv[2]);
  const std::int64_t rows = std::stoll(argv[3]);
  const std::int64_t columns = std::stoll(argv[4]);
  at::set_num_threads(std::stoi(argv[8]));
  const int num_steps = std::stoi(argv[9]);
  const tessera::dist::Mesh mesh = tessera::bench::connect();
  const std::int64_t samples = std::stoll(argv[5]) / mesh.world_size();
  torch::manual_seed(mesh.rank());

  tessera::embedding::FusedOptimizer optimizer = tessera::embedding::RowWiseAdagrad{.lr = 0.01};
  if (name == "sgd") optimizer = tessera::embedding::Sgd{.lr = 0.01};
  tessera::TablePlan plan;
  plan.world_size = mesh.world_size();
  const auto configs = make_tables(num_tables, rows, columns);
  for (std::int64_t i = 0; i < num_tables; ++i) {
    plan.tables[configs[static_cast<std::size_t>(i)].name] = {
        tessera::TableSharding::table_wise, {static_cast<int>(i % mesh.world_size())}};
  }
  const auto tables =
      tessera::shard(tessera::EmbeddingBagCollection(configs, {.device = at::kMeta}), plan, mesh,
                     {.optimizer = optimizer});
  std::vector<tessera::KeyedJaggedTensor> batches;
  for (int i = 0; i < 4; ++i) {
    batches.push_back(make_batch(num_tables, rows, samples, std::stoll(argv[6]), argv[7])
                          .to(tessera::bench::device()));
  }
  const at::Tensor gradient =
      torch::randn({samples, num_tables * columns}, tessera::bench::device());
  std::string seconds;
  for (int step = 0; step < num_steps; ++step) {
    tessera::bench::wait_for_device();
    const auto begin = std::chrono::steady_clock::now();
    const at::Tensor pooled =
        tables->forward(batches[static_cast<std::size_t>(step) % batches.size()]).values();
    pooled.backward(gradient);
    tessera::bench::wait_for_device();
    const std::chrono::duration<double> duration = std::chrono::steady_clock::now() - begin;
    seconds += (step == 0 ? "" : ", ") + std::to_string(duration.count());
  }
  if (mesh.rank() == 0) {
    std::printf(
        "{\"seconds\": [%s], \"peak_nbytes\": %lld, \"num_ids\": %lld, \"num_touched_rows\": "
        "%lld}\n",
        seconds.c_str(), static_cast<long long>(tessera::bench::peak_nbytes()),
        static_cast<long long>(batches[0].values().numel()),
        static_cast<long long>(num_touched_rows(batches[0])));
  }
  return 0;
}
