// Trains a recommendation model whose tables are sharded by a plan. Resumes from its newest
// checkpoint, also under another plan and on another number of ranks.
//   torchrun --no-python --nproc-per-node 2 dlrm checkpoints --steps 300
//   torchrun --no-python --nproc-per-node 3 dlrm checkpoints --steps 600 --plan plan.json
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <sstream>

#include "dlrm/clicks.h"
#include "dlrm/model.h"
#include "tessera/tessera.h"

namespace example {
namespace {

using namespace tessera::literals;

constexpr int kWrongUsage = 2;
constexpr std::int64_t kSamples = 768;  // of the batch of all ranks

struct Options {
  std::string directory;         // of checkpoints
  std::string plan;              // a file; empty: Tessera proposes one
  std::string losses;            // a file to append to; empty: none
  std::int64_t num_steps = 300;  // since the training began, before resumes too
};

/// Reads the command line, or ends the process with its help or an error.
Options parse(int argc, char** argv) {
  Options options;
  CLI::App app(
      "Trains a recommendation model on made-up clicks. Resumes from the newest checkpoint in "
      "DIRECTORY if there is one.");
  app.add_option("directory", options.directory, "directory of checkpoints; created if missing")
      ->required();
  app.add_option("--steps", options.num_steps, "number of the last step")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--plan", options.plan, "table plan (JSON file); default: proposed by Tessera")
      ->check(CLI::ExistingFile);
  app.add_option("--losses", options.losses, "append a line of JSON for each step to a file");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    std::exit(code == 0 ? 0 : kWrongUsage);
  }
  return options;
}

std::string ranks(int number) {
  return std::to_string(number) + (number == 1 ? " rank" : " ranks");
}

/// Prints on rank 0: lines that stay (`say`), and a line that the next one replaces (`progress`).
class Output {
 public:
  explicit Output(const tessera::dist::Mesh& mesh)
      : speaks_(mesh.rank() == 0), is_terminal_(isatty(STDOUT_FILENO) != 0) {}

  void say(const std::string& line) const {
    if (speaks_) std::cout << (is_terminal_ ? "\r\x1b[K" : "") << line << std::endl;
  }
  void progress(const std::string& line) const {
    if (speaks_ && is_terminal_) std::cout << '\r' << line << "\x1b[K" << std::flush;
  }

 private:
  bool speaks_;
  bool is_terminal_;
};

/// Returns the plan in the file of `--plan`. Without a file, returns the plan that Tessera
/// proposes, and prints it with the reasons.
tessera::TablePlan plan_for(const std::vector<tessera::EmbeddingBagConfig>& tables,
                            const tessera::embedding::FusedOptimizer& optimizer,
                            const tessera::dist::Mesh& mesh, const Options& options,
                            const Output& output) {
  if (!options.plan.empty()) {
    std::stringstream text;
    text << std::ifstream(options.plan).rdbuf();
    return tessera::TablePlan::from_json(text.str(), options.plan);
  }
  tessera::embedding::PlanOptions planning{.memory_per_rank = 64_MiB,
                                           .batch_size = kSamples / mesh.world_size(),
                                           .optimizer = optimizer};
  for (const Clicks::Feature& feature : Clicks::features()) {
    planning.pooling_factors[feature.name] = (1 + static_cast<double>(feature.max_length)) / 2;
  }
  const tessera::ProposedPlan proposed = tessera::embedding::plan(tables, mesh, planning);
  output.say(proposed.to_text());
  return proposed.plan;
}

/// Loads the newest valid checkpoint of `directory` if there is one.
void resume(tessera::TrainState& state, const std::string& directory, const Output& output) {
  const auto found = tessera::formats::latest_valid(directory);
  for (const auto& skipped : found.skipped) {
    output.say("skipped " + skipped.path + ": " + skipped.why);
  }
  if (found.path.empty()) {
    output.say("begins at step 1");
    return;
  }
  const tessera::LoadSummary summary = tessera::load(state, found);
  output.say("resumes from " + summary.path + ", saved by " + ranks(summary.saved_world_size));
}

void train(const Options& options) {
  const tessera::dist::Mesh mesh = tessera::dist::init_from_env();
  if (kSamples % mesh.world_size() != 0) {
    throw std::runtime_error("expected a number of ranks that divides " + std::to_string(kSamples) +
                             ", found " + std::to_string(mesh.world_size()));
  }
  const std::int64_t share = kSamples / mesh.world_size();
  const Output output(mesh);

  torch::manual_seed(0);
  const tessera::embedding::FusedOptimizer fused = tessera::embedding::RowWiseAdagrad{.lr = 0.1};
  const auto configs = tables_of_clicks();
  const auto plan = plan_for(configs, fused, mesh, options, output);
  const auto tables = tessera::shard(std::make_shared<tessera::EmbeddingBagCollection>(configs),
                                     plan, mesh, {.optimizer = fused});
  Dlrm model(tables);
  tessera::fully_shard(*model, {.mesh = mesh});  // all but the tables
  torch::optim::Adam optimizer(tessera::parameters(*model), torch::optim::AdamOptions(1e-3));

  std::int64_t step = 0;
  tessera::TrainState state{model, optimizer};
  state.with("step", step);
  std::filesystem::create_directories(options.directory);
  resume(state, options.directory, output);

  std::int64_t next_step = step;
  tessera::InputPipeline<Clicks::Batch> batches(
      tables,
      [&]() -> std::optional<Clicks::Batch> {
        if (next_step == options.num_steps) return std::nullopt;
        return Clicks::batch(++next_step, mesh.rank() * share, share);
      },
      [](const Clicks::Batch& batch) { return batch.sparse; });

  std::ofstream losses;
  if (mesh.rank() == 0 && !options.losses.empty()) losses.open(options.losses, std::ios::app);
  double recent = 0;
  const auto begin = std::chrono::steady_clock::now();
  const std::int64_t first_step = step;
  while (auto item = batches.next()) {
    step = item->batch.step;
    const tessera::KeyedTensor pooled = tables->forward(std::move(item->input));
    const at::Tensor logits = tessera::forward(model, item->batch.dense, pooled);
    const at::Tensor loss = torch::binary_cross_entropy_with_logits(logits, item->batch.clicked);
    loss.backward();  // also updates the tables (fused optimizer)
    optimizer.step();
    optimizer.zero_grad();

    at::Tensor mean = loss.detach() / mesh.world_size();
    mesh.world()->all_reduce(mean, "loss").wait();
    const auto value = mean.item<double>();
    recent = recent == 0 ? value : 0.95 * recent + 0.05 * value;
    losses << R"({"step": )" << step << R"(, "loss": )" << std::setprecision(9) << value
           << R"(, "by": ")" << ranks(mesh.world_size()) << "\"}\n";
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    char line[120];
    std::snprintf(line, sizeof line, "step %ld of %ld, loss %.4f, %.0f samples/s",
                  static_cast<long>(step), static_cast<long>(options.num_steps), recent,
                  static_cast<double>((step - first_step) * kSamples) / seconds.count());
    output.progress(line);
    if (step % 100 == 0) output.say(line);
  }
  const std::string path = options.directory + "/step-" + std::to_string(step);
  if (!std::filesystem::exists(path)) {
    tessera::save(state, path);
    output.say("saved " + path);
  }
}

}  // namespace
}  // namespace example

int main(int argc, char** argv) {
  const example::Options options = example::parse(argc, argv);
  try {
    example::train(options);
  } catch (const c10::Error& error) {
    std::cerr << "dlrm: " << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "dlrm: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
