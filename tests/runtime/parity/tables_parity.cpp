// Trains embedding tables from given rows, or from a checkpoint, as tests/interop/torchrec/
// train_torchrec.py does with torchrec: the same tables, plan, batches and loss. Run under
// torchrun.
//   tables_parity TABLES.json PLAN.json OPTIMIZER INITIAL|- LOAD|- BATCHES FIRST_STEP SAVE OUTPUT
// OUTPUT: a folder; rank r writes `<r>/outputs.safetensors` there, with `model.output_<step>`.
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>

#include "base/json.h"
#include "runtime/parity/safetensors_file.h"
#include "tessera/tessera.h"

namespace {

constexpr double kRate = 0.1;
constexpr double kEps = 1e-6;

std::string text_of(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

/// Reads `[{"name": …, "rows": …, "columns": …, "pooling": "sum", "weighted": false}, …]`.
std::vector<tessera::EmbeddingBagConfig> read_tables(
    const std::string& path, tessera::EmbeddingBagCollectionOptions& options) {
  std::vector<tessera::EmbeddingBagConfig> tables;
  const tessera::Value json = tessera::parse_json(text_of(path), path);
  for (const tessera::Value& each : *json.get_if<tessera::Value::List>()) {
    tessera::EmbeddingBagConfig& table = tables.emplace_back();
    table.name = *each.find("name")->get_if<std::string>();
    table.num_embeddings = *each.find("rows")->get_if<std::int64_t>();
    table.embedding_dim = *each.find("columns")->get_if<std::int64_t>();
    table.feature_names = {"f_" + table.name};
    if (const auto* pooling = each.find("pooling"); pooling && *pooling == "mean") {
      table.pooling = tessera::Pooling::mean;
    }
    if (const auto* weighted = each.find("weighted"); weighted && *weighted == true) {
      options.is_weighted = true;
    }
  }
  return tables;
}

tessera::embedding::FusedOptimizer optimizer_named(const std::string& name) {
  if (name == "sgd") return tessera::embedding::Sgd{.lr = kRate};
  if (name == "adagrad") return tessera::embedding::Adagrad{.lr = kRate, .eps = kEps};
  return tessera::embedding::RowWiseAdagrad{.lr = kRate, .eps = kEps};
}

/// Has the tables as a member of the same name as in the peer, so that keys are equal.
struct Net : torch::nn::Module {
  explicit Net(std::shared_ptr<tessera::ShardedEmbeddingBagCollection> tables)
      : ebc(register_module("ebc", std::move(tables))) {}
  std::shared_ptr<tessera::ShardedEmbeddingBagCollection> ebc;
};

void run(char** argv) {
  const auto mesh = tessera::dist::init_from_env();
  tessera::EmbeddingBagCollectionOptions options;
  const auto configs = read_tables(argv[1], options);
  const tessera::EmbeddingBagCollection whole(configs, options);
  if (const std::string initial = argv[4]; initial != "-") {
    const tessera::test::SafetensorsFile weights(initial);
    const at::NoGradGuard no_grad;
    for (const auto& config : configs) {
      whole.weight(config.name).copy_(weights.read(config.name));
    }
  }
  const auto plan = tessera::TablePlan::from_json(text_of(argv[2]), argv[2]);
  const auto net = std::make_shared<Net>(
      tessera::shard(whole, plan, mesh, {.optimizer = optimizer_named(argv[3])}));
  tessera::TrainState state{std::shared_ptr<torch::nn::Module>(net)};
  if (const std::string from = argv[5]; from != "-") {
    // The peer's model has another layer, which is unexpected here.
    tessera::load(state, from, {.allow_unexpected = true});
  }

  const tessera::test::SafetensorsFile batches(argv[6]);
  std::vector<std::string> features;
  for (const auto& config : configs) features.push_back("f_" + config.name);
  const auto outputs = std::make_shared<torch::nn::Module>("Outputs");
  for (int step = std::stoi(argv[7]);; ++step) {
    const std::string key = std::to_string(step) + "." + std::to_string(mesh.rank()) + ".";
    if (!batches.contains(key + "lengths")) break;
    const auto batch = tessera::KeyedJaggedTensor::from_lengths(
        features, batches.read(key + "values"), batches.read(key + "lengths"),
        options.is_weighted ? batches.read(key + "weights") : at::Tensor());
    const at::Tensor pooled = net->ebc->forward(batch).values();
    pooled.square().sum().backward();
    outputs->register_buffer("output_" + std::to_string(step), pooled.detach().clone());
  }
  tessera::save(state, argv[8], {.format = tessera::formats::Format::dcp});
  tessera::TrainState own_outputs{outputs};
  const auto folder = std::filesystem::path(argv[9]) / std::to_string(mesh.rank());
  std::filesystem::create_directories(folder);  // one per rank: only one writer may use it
  tessera::save(own_outputs, (folder / "outputs.safetensors").string(),
                {.format = tessera::formats::Format::safetensors});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 10) {
    std::cerr << "usage: tables_parity TABLES PLAN OPTIMIZER INITIAL|- LOAD|- BATCHES FIRST_STEP "
                 "SAVE OUTPUT\n";
    return 2;
  }
  try {
    run(argv);
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
