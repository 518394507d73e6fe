// Trains a small transformer on text. When it is started again, it resumes from its newest
// checkpoint, also on another number of ranks and under another strategy.
//   torchrun --no-python --nproc-per-node 2 resume_anywhere checkpoints LICENSE --steps 50
//   torchrun --no-python --nproc-per-node 4 resume_anywhere checkpoints LICENSE \
//       --strategy HYBRID_SHARD
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <map>

#include "tessera/tessera.h"
#include "train_transformer/model.h"
#include "train_transformer/text.h"

namespace example {
namespace {

constexpr int kWrongUsage = 2;
constexpr std::int64_t kRows = 16;  // of the batch of all ranks

struct Options {
  std::string directory;           // of checkpoints
  std::vector<std::string> files;  // the text
  tessera::ShardingStrategy strategy = tessera::FULL_SHARD;
  std::int64_t num_steps = 120;  // since the training began, before resumes too
  std::int64_t save_every = 10;  // steps
  std::string dcp;               // where to save for PyTorch at the end; empty: nowhere
  std::string losses;            // a file to append to; empty: none
};

/// Reads the command line, or ends the process with its help or an error.
Options parse(int argc, char** argv) {
  Options options;
  CLI::App app(
      "Trains a character-level transformer on text files. Resumes from the newest checkpoint in "
      "DIRECTORY if there is one.");
  const std::map<std::string, tessera::ShardingStrategy> strategies = {
      {"FULL_SHARD", tessera::FULL_SHARD},
      {"SHARD_GRAD_OP", tessera::SHARD_GRAD_OP},
      {"NO_SHARD", tessera::NO_SHARD},
      {"HYBRID_SHARD", tessera::HYBRID_SHARD},
      {"HYBRID_SHARD_ZERO2", tessera::HYBRID_SHARD_ZERO2}};
  std::string strategy = "FULL_SHARD";
  app.add_option("directory", options.directory,
                 "directory of checkpoints, or s3://BUCKET/PREFIX; created if missing")
      ->required();
  app.add_option("files", options.files, "the text")->required()->check(CLI::ExistingFile);
  app.add_option("--strategy", strategy, "sharding strategy; HYBRID_*: two replicas, each sharded")
      ->check(CLI::IsMember(strategies))
      ->capture_default_str();
  app.add_option("--steps", options.num_steps, "number of the last step")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--save-every", options.save_every, "steps from one checkpoint to the next")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--dcp", options.dcp,
                 "path for one more save at the end, in PyTorch's own format");
  app.add_option("--losses", options.losses, "append a line of JSON for each step to a file");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    std::exit(code == 0 ? 0 : kWrongUsage);
  }
  options.strategy = strategies.at(strategy);
  return options;
}

std::string ranks(int number) {
  return std::to_string(number) + (number == 1 ? " rank" : " ranks");
}

tessera::dist::Mesh make_mesh(tessera::ShardingStrategy strategy) {
  const bool is_hybrid =
      strategy == tessera::HYBRID_SHARD || strategy == tessera::HYBRID_SHARD_ZERO2;
  tessera::dist::MeshOptions options;
  if (is_hybrid) options.axes = {{"replicate", 2}, {"shard", -1}};
  return tessera::dist::init_from_env(options);
}

/// Returns this rank's rows of a batch. So a step trains on the same text for any number of ranks.
at::Tensor share_of(const at::Tensor& rows, const tessera::dist::Mesh& mesh) {
  return rows.chunk(mesh.world_size())[static_cast<std::size_t>(mesh.rank())];
}

/// Loads the newest valid checkpoint of `directory` if there is one: of any format, saved by any
/// number of ranks. Passes lines about it to `say`.
void resume(tessera::TrainState& state, const std::string& directory,
            const std::function<void(const std::string&)>& say) {
  const auto found = tessera::formats::latest_valid(directory);
  for (const auto& skipped : found.skipped) say("skipped " + skipped.path + ": " + skipped.why);
  if (found.path.empty()) {
    say("begins at step 1");
    return;
  }
  const tessera::LoadSummary summary = tessera::load(state, found);
  say("resumes from " + summary.path + ", saved by " + ranks(summary.saved_world_size));
}

void train(const Options& options) {
  const tessera::dist::Mesh mesh = make_mesh(options.strategy);
  if (kRows % mesh.world_size() != 0) {
    throw std::runtime_error("expected a number of ranks that divides " + std::to_string(kRows) +
                             ", found " + std::to_string(mesh.world_size()));
  }
  Config config;
  const Text text(options.files, config.sequence);
  config.vocabulary = text.vocabulary();
  torch::manual_seed(0);
  const auto model = std::make_shared<TransformerImpl>(config);
  tessera::fully_shard(
      *model,
      {.mesh = mesh, .policy = tessera::ModuleWrapPolicy<Block>(), .strategy = options.strategy});
  torch::optim::AdamW optimizer(tessera::parameters(*model), torch::optim::AdamWOptions(4e-4));
  torch::optim::StepLR scheduler(optimizer, /*step_size=*/40, /*gamma=*/0.5);

  // `state` has all that a resumed training needs. The batches depend only on text and step.
  std::int64_t step = 0;
  tessera::TrainState state{model, optimizer};
  state.with("scheduler", scheduler).with("step", step);

  const bool is_first = mesh.rank() == 0;
  const std::string who =
      "Tessera, " + ranks(mesh.world_size()) + ", " + std::string(to_string(options.strategy));
  const auto say = [&](const std::string& line) {
    if (is_first) std::cout << who << ": " << line << std::endl;
  };
  if (!options.directory.starts_with("s3://")) {
    std::filesystem::create_directories(options.directory);
  }
  resume(state, options.directory, say);

  std::ofstream losses;
  if (is_first && !options.losses.empty()) {
    losses.open(options.losses, std::ios::app);
    if (!losses) throw std::runtime_error(options.losses + ": cannot be written");
  }
  while (step < options.num_steps) {
    ++step;
    const Text::Batch batch = text.batch(step, kRows);
    const at::Tensor logits = tessera::forward(model, share_of(batch.ids, mesh));
    const at::Tensor loss = torch::nn::functional::cross_entropy(
        logits.flatten(0, 1), share_of(batch.targets, mesh).flatten());
    loss.backward();
    tessera::clip_grad_norm_(*model, 1.0);
    optimizer.step();
    scheduler.step();
    optimizer.zero_grad();

    at::Tensor mean = loss.detach() / mesh.world_size();
    mesh.world()->all_reduce(mean, "loss").wait();
    losses << R"({"step": )" << step << R"(, "loss": )" << std::setprecision(9)
           << mean.item<float>() << R"(, "by": ")" << who << "\"}" << std::endl;
    if (step % options.save_every == 0) {
      const std::string name = "step-" + std::to_string(step);
      say(name + ", loss " + std::to_string(mean.item<float>()));
      // `replace`, because a damaged checkpoint, which `resume` skipped, may have this name.
      tessera::save(
          state, options.directory + "/" + name,
          {.overwrite = tessera::OverwritePolicy::replace, .async = true, .keep_last = 3});
    }
  }
  state.wait();
  if (!options.dcp.empty()) {
    tessera::save(state, options.dcp, {.format = tessera::formats::Format::dcp});
    say("saved " + options.dcp + " for PyTorch");
  }
}

}  // namespace
}  // namespace example

int main(int argc, char** argv) {
  const example::Options options = example::parse(argc, argv);
  try {
    example::train(options);
  } catch (const c10::Error& error) {
    std::cerr << "resume_anywhere: " << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "resume_anywhere: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
