// Trains a mixture of experts on text. Each rank uses only the experts to which its own tokens are
// routed. Saves at the end. Resumes from the newest checkpoint, saved by any number of ranks.
//   torchrun --no-python --nproc-per-node 2 mixture_of_experts checkpoints LICENSE --steps 30
//   torchrun --no-python --nproc-per-node 4 mixture_of_experts checkpoints LICENSE --steps 60
#include <CLI/CLI.hpp>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <iostream>

#include "mixture_of_experts/model.h"
#include "tessera/tessera.h"
#include "train_transformer/text.h"

namespace example {
namespace {

constexpr int kWrongUsage = 2;
constexpr std::int64_t kRows = 4;  // of the batch of all ranks

struct Options {
  std::string directory;           // of checkpoints
  std::vector<std::string> files;  // the text
  std::int64_t num_steps = 60;     // since the training began, before resumes too
  std::string losses;              // a file to append to; empty: none
};

/// Reads the command line, or ends the process with its help or an error.
Options parse(int argc, char** argv) {
  Options options;
  CLI::App app(
      "Trains a mixture of experts on text files. Each expert is a unit of fully_shard. "
      "Resumes from the newest checkpoint in DIRECTORY if there is one.");
  app.add_option("directory", options.directory, "directory of checkpoints; created if missing")
      ->required();
  app.add_option("files", options.files, "the text")->required()->check(CLI::ExistingFile);
  app.add_option("--steps", options.num_steps, "number of the last step, which is saved")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app.add_option("--losses", options.losses, "append a line of JSON for each step to a file");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    const int code = app.exit(error);
    std::exit(code == 0 ? 0 : kWrongUsage);
  }
  return options;
}

/// Returns this rank's rows of a batch. So a step trains on the same text for any number of ranks.
at::Tensor share_of(const at::Tensor& rows, const tessera::dist::Mesh& mesh) {
  return rows.chunk(mesh.world_size())[static_cast<std::size_t>(mesh.rank())];
}

void train(const Options& options) {
  const tessera::dist::Mesh mesh = tessera::dist::init_from_env();
  if (kRows % mesh.world_size() != 0) {
    throw std::runtime_error("expected a number of ranks that divides " + std::to_string(kRows) +
                             ", found " + std::to_string(mesh.world_size()));
  }
  MoeConfig config;
  const Text text(options.files, config.sequence);
  config.vocabulary = text.vocabulary();
  torch::manual_seed(0);
  const auto model = std::make_shared<MoeModelImpl>(config);
  tessera::fully_shard(*model,
                       {.mesh = mesh, .policy = tessera::ModuleWrapPolicy<Expert, Experts>()});
  torch::optim::AdamW optimizer(tessera::parameters(*model), torch::optim::AdamWOptions(2e-3));
  std::int64_t step = 0;
  tessera::TrainState state{model, optimizer};
  state.with("step", step);

  const std::string who = std::to_string(mesh.world_size()) + " rank(s)";
  const auto say = [&](const std::string& line) {
    if (mesh.rank() == 0) std::cout << who << ": " << line << std::endl;
  };
  std::filesystem::create_directories(options.directory);
  const auto found = tessera::formats::latest_valid(options.directory);
  for (const auto& skipped : found.skipped) say("skipped " + skipped.path + ": " + skipped.why);
  if (!found.path.empty()) tessera::load(state, found);
  say(std::to_string(tessera::fsdp_modules(*model).size()) + " units, begins after step " +
      std::to_string(step));

  std::ofstream losses;
  if (mesh.rank() == 0 && !options.losses.empty()) {
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
    optimizer.zero_grad();

    at::Tensor mean = loss.detach() / mesh.world_size();
    mesh.world()->all_reduce(mean, "loss").wait();
    at::Tensor num_used = torch::zeros({mesh.world_size()}, torch::kInt);
    for (const Experts& mixture : model->mixtures) num_used[mesh.rank()] += mixture->num_used;
    mesh.world()->all_reduce(num_used, "experts in use").wait();
    losses << R"({"step": )" << step << R"(, "loss": )" << std::setprecision(9)
           << mean.item<float>() << R"(, "by": ")" << who << "\"}" << std::endl;
    if (step % 10 != 0) continue;
    std::string line =
        "step " + std::to_string(step) + ", loss " + std::to_string(mean.item<float>()) + "; of " +
        std::to_string(config.num_experts * config.num_layers) + " experts, ranks used";
    for (int rank = 0; rank < mesh.world_size(); ++rank) {
      line += " " + std::to_string(num_used[rank].item<int>());
    }
    say(line);
  }
  const std::string path = options.directory + "/step-" + std::to_string(step);
  tessera::save(state, path, {.overwrite = tessera::OverwritePolicy::replace});
  say("saved " + path);
}

}  // namespace
}  // namespace example

int main(int argc, char** argv) {
  const example::Options options = example::parse(argc, argv);
  try {
    example::train(options);
  } catch (const c10::Error& error) {
    std::cerr << "mixture_of_experts: " << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "mixture_of_experts: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
