// Trains a small transformer on text, sharded over all ranks. In one process:
//   train_transformer README.md
// In two processes on this machine (torchrun comes with PyTorch; mpirun and srun work too):
//   torchrun --no-python --nproc-per-node 2 train_transformer README.md
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <map>

#include "model.h"
#include "tessera/tessera.h"
#include "text.h"

namespace example {
namespace {

constexpr int kWrongUsage = 2;

struct Options {
  std::vector<std::string> files;
  tessera::ShardingStrategy strategy = tessera::FULL_SHARD;
  int num_replicas = 1;  // more than 1 for hybrid strategies only
  bool is_bf16 = false;
  bool is_recomputed = false;
  std::int64_t num_steps = 200;
  std::int64_t batch = 16;  // rows of the batch of all ranks
  double learning_rate = 1e-3;
  std::string losses_file;
  Config model;

  bool is_hybrid() const {
    return strategy == tessera::HYBRID_SHARD || strategy == tessera::HYBRID_SHARD_ZERO2;
  }
};

/// Reads the command line, or ends the process with its help or an error.
Options parse(int argc, char** argv) {
  Options options;
  CLI::App app(
      "Trains a character-level transformer on text files. Shards its parameters over all ranks "
      "that torchrun, mpirun or srun starts.");
  const std::map<std::string, tessera::ShardingStrategy> strategies = {
      {"FULL_SHARD", tessera::FULL_SHARD},
      {"SHARD_GRAD_OP", tessera::SHARD_GRAD_OP},
      {"NO_SHARD", tessera::NO_SHARD},
      {"HYBRID_SHARD", tessera::HYBRID_SHARD},
      {"HYBRID_SHARD_ZERO2", tessera::HYBRID_SHARD_ZERO2}};
  std::string strategy = "FULL_SHARD";
  app.add_option("files", options.files, "the text")->required()->check(CLI::ExistingFile);
  app.add_option("--strategy", strategy, "sharding strategy")
      ->check(CLI::IsMember(strategies))
      ->capture_default_str();
  app.add_option("--replicas", options.num_replicas,
                 "for HYBRID strategies: number of replicas, each sharded over its own ranks")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_flag("--bf16", options.is_bf16,
               "compute in bfloat16; parameters and optimizer keep float32");
  app.add_flag("--recompute", options.is_recomputed,
               "compute the blocks' activations again in the backward, to save memory");
  app.add_option("--steps", options.num_steps, "how many steps")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--batch", options.batch, "rows per step, of all ranks together")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--lr", options.learning_rate, "learning rate of AdamW")->capture_default_str();
  app.add_option("--width", options.model.width, "width of the model")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--layers", options.model.num_layers, "number of blocks")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--losses", options.losses_file, "write step and loss to a CSV file");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    std::exit(code == 0 ? 0 : kWrongUsage);
  }
  options.strategy = strategies.at(strategy);
  if (options.is_hybrid() != (options.num_replicas > 1)) {
    std::fprintf(stderr,
                 "train_transformer: --replicas: expected 2 or more with HYBRID strategies, and "
                 "only with them\n");
    std::exit(kWrongUsage);
  }
  if (options.model.width % options.model.num_heads != 0) {
    std::fprintf(stderr,
                 "train_transformer: --width: expected a multiple of the %lld heads, found %lld\n",
                 static_cast<long long>(options.model.num_heads),
                 static_cast<long long>(options.model.width));
    std::exit(kWrongUsage);
  }
  if (options.is_recomputed) options.model.recompute.emplace();
  return options;
}

/// Prints the progress on rank 0. On a terminal, each line replaces the line before.
class Progress {
 public:
  Progress(bool is_shown, std::int64_t num_steps) : is_shown_(is_shown), num_steps_(num_steps) {}

  void step(std::int64_t number, double loss, std::int64_t num_tokens) {
    num_tokens_ += num_tokens;
    const bool is_last = number == num_steps_;
    if (!is_shown_ || (!is_terminal_ && number % 20 != 0 && !is_last)) return;
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin_;
    std::printf("%sstep %4lld/%lld  loss %.4f  %8.0f tokens/s%s", is_terminal_ ? "\r" : "",
                static_cast<long long>(number), static_cast<long long>(num_steps_), loss,
                static_cast<double>(num_tokens_) / passed.count(),
                is_terminal_ && !is_last ? "" : "\n");
    std::fflush(stdout);
  }

 private:
  bool is_shown_;
  bool is_terminal_ = isatty(STDOUT_FILENO) != 0;
  std::int64_t num_steps_;
  std::int64_t num_tokens_ = 0;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

void train(const Options& options) {
  tessera::dist::MeshOptions mesh_options;
  if (options.strategy == tessera::HYBRID_SHARD ||
      options.strategy == tessera::HYBRID_SHARD_ZERO2) {
    mesh_options.axes = {{"replicate", options.num_replicas}, {"shard", -1}};
  }
  const tessera::dist::Mesh mesh = tessera::dist::init_from_env(mesh_options);
  if (options.batch % mesh.world_size() != 0) {
    throw std::runtime_error("--batch: expected a multiple of the " +
                             std::to_string(mesh.world_size()) + " ranks, found " +
                             std::to_string(options.batch));
  }
  Config config = options.model;
  const Text text(options.files, config.sequence);
  config.vocabulary = text.vocabulary();

  torch::manual_seed(0);
  const auto model = std::make_shared<TransformerImpl>(config);
  std::int64_t num_parameters = 0;
  for (const at::Tensor& parameter : tessera::parameters(*model))
    num_parameters += parameter.numel();
  tessera::MixedPrecision precision;
  if (options.is_bf16) precision.param_dtype = torch::kBFloat16;
  tessera::fully_shard(*model, {.mesh = mesh,
                                .policy = tessera::ModuleWrapPolicy<Block>(),
                                .strategy = options.strategy,
                                .mixed_precision = precision});
  torch::optim::AdamW optimizer(tessera::parameters(*model), options.learning_rate);

  const bool is_first = mesh.rank() == 0;
  if (is_first) {
    std::printf("%lld parameters in %zu units on %d rank(s), %s; %lld characters of text\n",
                static_cast<long long>(num_parameters), tessera::fsdp_modules(*model).size(),
                mesh.world_size(), std::string(to_string(options.strategy)).c_str(),
                static_cast<long long>(text.size()));
  }
  std::ofstream losses;
  if (is_first && !options.losses_file.empty()) {
    losses.open(options.losses_file);
    if (!losses) throw std::runtime_error(options.losses_file + ": cannot be written");
    losses << "step,loss\n" << std::setprecision(9);
  }
  Progress progress(is_first, options.num_steps);
  for (std::int64_t step = 1; step <= options.num_steps; ++step) {
    const Text::Batch batch = text.batch(step, options.batch);
    const auto part = [&](const at::Tensor& rows) {
      return rows.chunk(mesh.world_size())[static_cast<std::size_t>(mesh.rank())];
    };
    const at::Tensor logits = tessera::forward(model, part(batch.ids));
    const at::Tensor loss = torch::nn::functional::cross_entropy(
        logits.flatten(0, 1).to(torch::kFloat), part(batch.targets).flatten());
    loss.backward();
    tessera::clip_grad_norm_(*model, 1.0);
    tessera::fused_step(optimizer);  // as optimizer.step(), but faster
    optimizer.zero_grad();

    const at::Tensor mean = loss.detach() / mesh.world_size();
    mesh.world()->all_reduce(mean, "loss").wait();
    if (losses) losses << step << ',' << mean.item<float>() << '\n';
    progress.step(step, mean.item<double>(), batch.ids.numel());
  }
}

}  // namespace
}  // namespace example

int main(int argc, char** argv) {
  const example::Options options = example::parse(argc, argv);
  try {
    example::train(options);
  } catch (const c10::Error& error) {
    std::cerr << "train_transformer: " << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "train_transformer: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
