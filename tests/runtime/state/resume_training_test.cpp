#include <gmock/gmock.h>
#include <torch/torch.h>

#include <bit>
#include <cstdlib>

#include "formats/dcp.h"
#include "runtime/state/saved_states.h"
#include "runtime/support/processes.h"
#include "support/temporary_directory.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/native.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/job_state.h"
#include "tessera/reshard/planner.h"

// Resumed training gives the same losses after a move to other ranks and another strategy.

namespace tessera {
namespace {

using formats::Format;
using test::Configuration;
using test::OptimizerKind;
using test::SavedRun;
using test::Trainer;

constexpr double kTolerance = 1e-6;  // relative, of a loss: sums run in another order
constexpr Configuration::Kind kSharded = Configuration::Kind::fully_sharded;
const Configuration kSources[] = {{kSharded, FULL_SHARD, 1, 2},
                                  {kSharded, HYBRID_SHARD, 2, 4},
                                  {Configuration::Kind::replicated, FULL_SHARD, 1, 3}};

/// Moves a checkpoint as `ckpt-reshard` does.
void reshard_offline(const std::string& from, const std::string& to,
                     const reshard::PlanOptions& options) {
  FileSystem& fs = FileSystem::posix();
  const auto reader = formats::open_checkpoint(fs, from);
  const reshard::Plan plan = reshard::plan_reshard(reader->contents(), from, options);
  ASSERT_TRUE(plan.problems.empty()) << reshard::problems_to_string(plan.problems, 5);
  std::vector<Value> values;
  for (const std::size_t i : plan.value_sources) values.push_back(reader->read_value(i));
  const auto writer = options.format == Format::dcp
                          ? formats::create_dcp(fs, to, plan.destination, values)
                          : formats::create_native(fs, to, plan.destination, values);
  reshard::execute(plan, *reader, *writer, {});
  writer->commit();
}

void expect_to_go_on(const SavedRun& run, const std::string& path, const Configuration& to) {
  const std::string what = path.substr(path.rfind('/') + 1) + " as " + to.name();
  test::on_ranks(
      to.world_size,
      [&](const dist::Mesh& mesh) {
        Trainer trainer(to, mesh, OptimizerKind::adamw_two_groups);
        TrainState state(trainer.model, *trainer.optimizer);
        load(state, path);
        test::expect_same_shards(trainer.state({.type = SHARDED}), run.state, what);
        test::expect_to_go_on_as(run, trainer, kTolerance, what);
      },
      to.mesh_options());
}

// Shows A4.
TEST(ResumeTrainingTest, MovedWhenLoadedARunGoesOnAsIfNothingHadHappened) {
  const test::TemporaryDirectory directory;
  std::vector<SavedRun> runs;
  for (const Configuration& source : kSources) {
    runs.push_back(test::run_that_saves(source, directory.path() + "/" + source.name(), {}));
  }
  std::size_t next = 0;
  for (const Configuration& to : test::configurations({1, 2, 3, 4})) {
    const std::size_t from = next++ % std::size(kSources);
    expect_to_go_on(runs[from], directory.path() + "/" + kSources[from].name(), to);
  }
}

// Shows A4.
TEST(ResumeTrainingTest, MovedOfflineARunGoesOnAsIfNothingHadHappened) {
  struct Way {
    reshard::PlanOptions options;
    std::string name;
    Configuration to;
  };
  const std::vector<Way> ways = {
      {{.world_size = 3}, "dim0_of_3", {kSharded, SHARD_GRAD_OP, 1, 3}},
      {{.world_size = 4, .strategy = "flat"}, "flat_of_4", {kSharded, HYBRID_SHARD, 2, 4}},
      {{.world_size = 1}, "one", {Configuration::Kind::replicated, FULL_SHARD, 1, 2}},
      {{.format = Format::dcp}, "dcp", {kSharded, NO_SHARD, 1, 1}},
      {{.format = Format::dcp, .world_size = 3}, "dcp_of_3", {kSharded, FULL_SHARD, 1, 4}},
  };
  for (const Configuration& source : kSources) {
    const test::TemporaryDirectory directory;
    const std::string path = directory.path() + "/" + source.name();
    const SavedRun run = test::run_that_saves(source, path, {});
    for (const Way& way : ways) {
      const bool has_units = source.kind == kSharded;
      if (way.options.strategy == "flat" && !has_units) continue;
      const std::string moved = path + "_moved_to_" + way.name;
      reshard_offline(path, moved, way.options);
      expect_to_go_on(run, moved, way.to);
    }
    // And back from the other format.
    reshard_offline(path + "_moved_to_dcp_of_3", path + "_there_and_back", {.world_size = 2});
    expect_to_go_on(run, path + "_there_and_back", {kSharded, HYBRID_SHARD_ZERO2, 2, 2});
  }
}

// --- random numbers, which ranks that are threads would share

constexpr const char* kPath = "TESSERA_TEST_CHECKPOINT";
constexpr const char* kStrategy = "TESSERA_TEST_STRATEGY";

/// Resumes from the checkpoint; the first run trains and saves it. Returns the losses.
TEST(ResumeTrainingTest, DISABLED_AsOneRank) {
  test::as_process([](const dist::Mesh& mesh) {
    const std::string path = std::getenv(kPath);
    const bool is_first = std::string(std::getenv(kStrategy)).empty();
    torch::manual_seed(3);
    torch::nn::Sequential model(torch::nn::Linear(9, 9), torch::nn::Tanh(), torch::nn::Dropout(0.4),
                                torch::nn::Linear(9, 9));
    fully_shard(*model, {.mesh = mesh,
                         .policy = ModuleWrapPolicy<torch::nn::LinearImpl>(),
                         .strategy = is_first ? FULL_SHARD : SHARD_GRAD_OP});
    torch::optim::AdamW optimizer(model->parameters(), 0.01);
    torch::manual_seed(static_cast<std::uint64_t>(is_first ? 10 + mesh.rank() : 0));
    const auto train = [&](int num_steps) {
      std::string losses;
      for (int step = 0; step < num_steps; ++step) {
        optimizer.zero_grad();
        const at::Tensor loss = forward(model, torch::rand({6, 9})).square().mean();
        loss.backward();
        optimizer.step();
        losses += std::to_string(std::bit_cast<std::uint32_t>(loss.item<float>())) + " ";
      }
      return losses;
    };
    const Stateful rng = cpu_rng();
    auto state = TrainState{model, optimizer}.per_rank("rng", rng);
    if (is_first) {
      train(3);
      save(state, path);
    } else {
      load(state, path);
    }
    return train(20);
  });
}

// Shows A4.
TEST(ResumeTrainingTest, WithTheRandomNumbersOfEachRankMasksAndLossesAreTheSameBits) {
  const test::TemporaryDirectory directory;
  const auto run = [&](const std::string& strategy) {
    return test::run_processes(
        2, "ResumeTrainingTest.DISABLED_AsOneRank",
        {.environment = {{kPath, directory.path() + "/a"}, {kStrategy, strategy}}});
  };
  const auto expected = run("");
  EXPECT_NE(expected[0], expected[1]);  // each its own numbers
  EXPECT_EQ(run("other"), expected);
}

}  // namespace
}  // namespace tessera
