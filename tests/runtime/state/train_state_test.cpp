#include <gmock/gmock.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "runtime/state/saved_states.h"
#include "runtime/state/small_trainer.h"
#include "support/fault_file_system.h"
#include "support/temporary_directory.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"

namespace tessera {
namespace {

using test::Configuration;
using test::error_of;
using test::OptimizerKind;
using test::Trainer;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr Configuration::Kind kSharded = Configuration::Kind::fully_sharded;
const Configuration kFullOn2{kSharded, FULL_SHARD, 1, 2};

/// Runs `body` on the ranks of a configuration.
void on(const Configuration& configuration,
        const std::function<void(const dist::Mesh&, Trainer&)>& body) {
  test::on_ranks(
      configuration.world_size,
      [&](const dist::Mesh& mesh) {
        Trainer trainer(configuration, mesh, OptimizerKind::adamw_two_groups);
        body(mesh, trainer);
      },
      configuration.mesh_options());
}

struct Counter {
  Value state_dict() const { return Value::Dict{{"seen", seen}, {"name", "loader"}}; }
  void load_state_dict(const Value& value) { seen = integer_in(*value.find("seen")); }
  std::int64_t seen = 0;
};

// Shows C8.
TEST(TrainStateTest, ValuesAndSchedulersTravelAlong) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  on(kFullOn2, [&](const dist::Mesh& mesh, Trainer& trainer) {
    torch::optim::StepLR scheduler(*trainer.optimizer, 2, 0.5);
    for (int step = 0; step < 3; ++step) {
      trainer.train(1);
      scheduler.step();
    }
    int step = 3;
    double best = 0.25;
    std::string run = "first";
    Counter counter{mesh.rank() == 0 ? 17 : 0};  // rank 0's is saved
    Value more = Value::Dict{{"nested", Value::Dict{{"list", Value::List{1, "two"}}}}};
    auto state = TrainState{trainer.model, *trainer.optimizer}
                     .with("scheduler", scheduler)
                     .with("step", step)
                     .with("best", best)
                     .with("run", run)
                     .with("loader", counter)
                     .with("more", more);
    save(state, path);
    EXPECT_THAT(error_of([&] { state.with("step", step); }), HasSubstr("'step'"));
    EXPECT_THAT(error_of([&] { state.with("a.b", step); }), HasSubstr("without dots"));
  });
  on({kSharded, NO_SHARD, 1, 1}, [&](const dist::Mesh& /*mesh*/, Trainer& trainer) {
    torch::optim::StepLR scheduler(*trainer.optimizer, 2, 0.5);
    std::int64_t step = 0;
    float best = 0;
    std::string run;
    Counter counter;
    Value more;
    auto state = TrainState{trainer.model, *trainer.optimizer}
                     .with("scheduler", scheduler)
                     .with("step", step)
                     .with("best", best)
                     .with("run", run)
                     .with("loader", counter)
                     .with("more", more);
    load(state, path);
    EXPECT_EQ(step, 3);
    EXPECT_EQ(best, 0.25F);
    EXPECT_EQ(run, "first");
    EXPECT_EQ(counter.seen, 17);
    EXPECT_EQ(more, Value(Value::Dict{{"nested", Value::Dict{{"list", Value::List{1, "two"}}}}}));
    const double lr = trainer.optimizer->param_groups()[0].options().get_lr();
    scheduler.step();
    EXPECT_DOUBLE_EQ(trainer.optimizer->param_groups()[0].options().get_lr(), lr);
    scheduler.step();  // the rate halves after four steps
    EXPECT_DOUBLE_EQ(trainer.optimizer->param_groups()[0].options().get_lr(), lr / 2);
  });
}

// Shows E13.
TEST(TrainStateTest, ValuesOfEachRankFollowTheirPolicy) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  on(kFullOn2, [&](const dist::Mesh& mesh, Trainer& trainer) {
    Value own(std::int64_t{10 + mesh.rank()});
    Value list = mesh.rank() == 0 ? Value(Value::List{0, 1, 2}) : Value(Value::List{3});
    auto state = TrainState{trainer.model, *trainer.optimizer}
                     .per_rank("own", own)
                     .per_rank("list", list, PerRank::split);
    save(state, path);
    own = Value();
    load(state, path);  // same number of ranks: each gets its own value, under every policy
    EXPECT_EQ(own, Value(10 + mesh.rank()));
  });
  on({kSharded, FULL_SHARD, 1, 4}, [&](const dist::Mesh& mesh, Trainer& trainer) {
    Value own;
    Value list;
    const auto load_with = [&](PerRank of_own, PerRank of_list) {
      auto state = TrainState{trainer.model, *trainer.optimizer}
                       .per_rank("own", own, of_own)
                       .per_rank("list", list, of_list);
      load(state, path);
    };
    EXPECT_THAT(error_of([&] { load_with(PerRank::refuse, PerRank::split); }),
                HasSubstr("own: per rank: expected as many ranks as at the save"));
    EXPECT_EQ(own, Value());
    load_with(PerRank::replicate, PerRank::split);
    EXPECT_EQ(own, Value(10 + mesh.rank() % 2));
    EXPECT_EQ(list, Value(Value::List{mesh.rank()}));
    load_with(PerRank::merge, PerRank::drop);
    EXPECT_EQ(own, Value(Value::List{10, 11}));
    EXPECT_THAT(error_of([&] { load_with(PerRank::split, PerRank::split); }),
                HasSubstr("per-rank value with the policy split"));
  });
}

// Shows E13.
TEST(TrainStateTest, RandomNumbersGoOnAndBranchOff) {
  const test::TemporaryDirectory directory;
  torch::nn::Linear model(2, 2);
  torch::manual_seed(5);
  const Stateful rng = cpu_rng();
  auto state = TrainState{model}.per_rank("rng", rng, PerRank::split);
  save(state, directory.path() + "/a");
  const at::Tensor expected = torch::rand({4});
  load(state, directory.path() + "/a");
  EXPECT_TRUE(torch::rand({4}).equal(expected));
  const Value saved = rng.state_dict();
  EXPECT_FALSE(rng.branch(saved, 1) == rng.branch(saved, 2));
  EXPECT_EQ(rng.branch(saved, 1), rng.branch(saved, 1));
}

// Shows E11.
TEST(TrainStateTest, AnUnchangedLayoutIsNotPlannedAgainAndGivesEqualBytes) {
  const test::TemporaryDirectory directory;
  on(kFullOn2, [&](const dist::Mesh& mesh, Trainer& trainer) {
    trainer.train(1);
    TrainState state(trainer.model, *trainer.optimizer);
    EXPECT_TRUE(save(state, directory.path() + "/a").has_planned);
    const dist::Traffic before = mesh.world()->traffic();
    EXPECT_FALSE(save(state, directory.path() + "/b").has_planned);
    EXPECT_EQ(mesh.world()->traffic(), before);
  });
  for (const char* file : {"index.h5", "rank-00000.h5", "rank-00001.h5"}) {
    const auto bytes = [&](const std::string& name) {
      return read_file(FileSystem::posix(), directory.path() + "/" + name + "/" + file, 1 << 24);
    };
    EXPECT_EQ(bytes("a"), bytes("b")) << file;
  }
}

// Shows E11.
TEST(TrainStateTest, ReplicasAreWrittenOnceAndByAll) {
  const test::TemporaryDirectory directory;
  on({Configuration::Kind::replicated, FULL_SHARD, 1, 4},
     [&](const dist::Mesh& mesh, Trainer& trainer) {
       TrainState state(trainer.model, *trainer.optimizer);
       const std::uint64_t own = save(state, directory.path() + "/a").nbytes_written;
       const at::Tensor all = torch::tensor({static_cast<std::int64_t>(own)});
       mesh.world()->all_reduce(all, "bytes").wait();
       std::int64_t whole = 0;
       for (const at::Tensor& parameter : test::unique_parameters(*trainer.model)) {
         whole += static_cast<std::int64_t>(parameter.nbytes());
       }
       whole += static_cast<std::int64_t>(trainer.step.nbytes());
       EXPECT_EQ(all.item<std::int64_t>(), whole);
       EXPECT_LT(static_cast<double>(own), 0.35 * static_cast<double>(whole));
       EXPECT_GT(static_cast<double>(own), 0.15 * static_cast<double>(whole));
     });
}

// Shows E13.
TEST(TrainStateTest, ASaveInTheBackgroundIsIsolated) {
  const test::TemporaryDirectory directory;
  on(kFullOn2, [&](const dist::Mesh& /*mesh*/, Trainer& trainer) {
    trainer.train(2);
    const StateDict expected = trainer.state();
    TrainState state(trainer.model, *trainer.optimizer);
    save(state, directory.path() + "/a", {.async = true});
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : trainer.model->parameters()) parameter.fill_(7);
    }
    trainer.train(3);  // its collectives and those of the save do not get mixed up
    load(state, directory.path() + "/a");  // waits for it
    test::expect_same_state(trainer.state(), expected, "saved in the background");
  });
}

// Shows E13.
TEST(TrainStateTest, TheNextCallThrowsWhatWentWrongInTheBackground) {
  const test::TemporaryDirectory directory;
  on(kFullOn2, [&](const dist::Mesh& mesh, Trainer& trainer) {
    TrainState state(trainer.model, *trainer.optimizer);
    save(state, directory.path() + "/a", {.async = true});
    // Another directory takes the save's path in the meantime.
    if (mesh.rank() == 0) std::filesystem::create_directories(directory.path() + "/a/x");
    mesh.world()->max(0, "both are here");
    const std::string error = error_of([&] { state.wait(); });
    if (error == "none") return;                         // the save was faster
    EXPECT_EQ(error_of([&] { state.wait(); }), "none");  // reported only once
    EXPECT_EQ(error_of([&] { save(state, directory.path() + "/b"); }), "none");
  });
}

// Shows E4.
TEST(TrainStateTest, AFailureOnOneRankIsOneOnAllAndLeavesNothing) {
  const test::TemporaryDirectory directory;
  on(kFullOn2, [&](const dist::Mesh& mesh, Trainer& trainer) {
    TrainState state(trainer.model, *trainer.optimizer);
    save(state, directory.path() + "/a");
    EXPECT_THAT(error_of([&] { save(state, directory.path() + "/a"); }), HasSubstr("exists"));
    EXPECT_THAT(error_of([&] { save(state, directory.path() + "/none/a"); }), HasSubstr("none"));
    // One rank has different state.
    if (mesh.rank() == 1) trainer.model->register_buffer("extra", torch::ones({2}));
    EXPECT_THAT(error_of([&] { save(state, directory.path() + "/b"); }),
                HasSubstr("state to save"));
    EXPECT_THAT(error_of([&] { load(state, directory.path() + "/a"); }),
                HasSubstr("extra: missing"));
    EXPECT_EQ(error_of([&] { load(state, directory.path() + "/a", {.allow_missing = true}); }),
              "none");
  });
  EXPECT_EQ(FileSystem::posix().list_directory(directory.path()), std::vector<std::string>{"a"});
}

// Shows E2.
TEST(TrainStateTest, FormatsOfOneWriterAreWrittenByAllRanksThroughRank0) {
  const test::TemporaryDirectory directory;
  static constexpr const char* kNames[] = {"/a.safetensors", "/b.safetensors", "/a.pt", "/b.pt"};
  StateDict expected;
  on(kFullOn2, [&](const dist::Mesh& mesh, Trainer& trainer) {
    trainer.train(2);
    std::int64_t seen = 5;
    TrainState state(trainer.model, *trainer.optimizer);
    state.with("seen", seen);
    for (const char* name : kNames) {
      const std::string path = directory.path() + name;
      const bool is_torch = path.ends_with(".pt");
      const SaveOptions options{
          .format = is_torch ? formats::Format::torch_zip : formats::Format::safetensors,
          .async = path.find("/b") != std::string::npos};
      save(state, path, options);
      state.wait();
      EXPECT_THAT(error_of([&] { save(state, path, options); }), HasSubstr("exists"));
    }
    const StateDict whole = trainer.state();
    if (mesh.rank() == 0) expected = whole;
  });
  EXPECT_EQ(FileSystem::posix().list_directory(directory.path()),
            (std::vector<std::string>{"a.pt", "a.safetensors", "a.safetensors.values.json", "b.pt",
                                      "b.safetensors", "b.safetensors.values.json"}));
  for (const char* name : kNames) {
    on({kSharded, FULL_SHARD, 1, 3}, [&](const dist::Mesh& /*mesh*/, Trainer& trainer) {
      std::int64_t seen = 0;
      TrainState state(trainer.model, *trainer.optimizer);
      state.with("seen", seen);
      load(state, directory.path() + name);
      EXPECT_EQ(seen, 5);
      test::expect_same_state(trainer.state(), expected, name);
    });
  }
}

// Shows E4.
TEST(TrainStateTest, HowLongRanksWaitForASaveIsNotHowLongTheMeshWaits) {
  const test::TemporaryDirectory directory;
  on(kFullOn2, [&](const dist::Mesh& mesh, Trainer& trainer) {
    const auto timeout = mesh.world()->store()->getTimeout();
    for (const char* name : {"/a", "/b", "/c"}) {
      TrainState state(trainer.model, *trainer.optimizer);
      save(state, directory.path() + name, {.timeout = std::chrono::seconds(5)});
    }
    EXPECT_EQ(mesh.world()->store()->getTimeout(), timeout);
  });
}

// Shows E4.
TEST(TrainStateTest, WhatHasNotChangedStaysInTheFilesOfTheBase) {
  const test::TemporaryDirectory directory;
  const auto path = [&](const std::string& name) { return directory.path() + "/" + name; };
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    test::SmallTrainer trainer(mesh, 300);
    trainer.fill(7);
    TrainState state = trainer.state();
    const SaveReport whole = save(state, path("a"));
    EXPECT_EQ(whole.nbytes_linked, 0u);
    trainer.number = 8;
    const SaveReport report = save(state, path("b"), {.base = path("a")});
    EXPECT_GT(report.nbytes_linked, 100'000u);
    EXPECT_EQ(report.nbytes_written + report.nbytes_linked, whole.nbytes_written);
    trainer.number = 9;
    save(state, path("c"), {.async = true, .base = path("b")});
    state.wait();
    EXPECT_THAT(error_of([&] { save(state, path("d"), {.base = path("none")}); }),
                HasSubstr("none"));
    EXPECT_THAT(
        error_of([&] { save(state, path("d"), {.base = path(mesh.rank() == 0 ? "a" : "b")}); }),
        HasSubstr("base of the checkpoint"));
    EXPECT_THAT(error_of([&] {
                  save(state, path("d"),
                       {.format = *formats::parse_format("dcp"), .base = path("a")});
                }),
                HasSubstr("format of a checkpoint with a base"));
  });
  EXPECT_FALSE(std::filesystem::exists(path("d")));
  std::filesystem::remove_all(path("a"));
  std::filesystem::remove_all(path("b"));
  test::on_ranks(1, [&](const dist::Mesh& mesh) {
    test::SmallTrainer trainer(mesh, 300);
    TrainState state = trainer.state();
    load(state, path("c"));
    EXPECT_EQ(trainer.number, 9);
    test::expect_filled(trainer.moments(), 7, "moments");
  });
}

// Shows E4.
TEST(TrainStateTest, ChangedRowsOfATableAreWrittenAlone) {
  const test::TemporaryDirectory directory;
  const auto path = [&](const std::string& name) { return directory.path() + "/" + name; };
  test::on_ranks(1, [&](const dist::Mesh& /*mesh*/) {
    torch::nn::Sequential model(torch::nn::Embedding(20'000, 8));
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    TrainState state(model, optimizer);
    const SaveReport whole = save(state, path("a"));
    const at::Tensor table = model->parameters()[0].detach();
    table.select(0, 5).fill_(3);
    table.select(0, 19'999).fill_(4);
    const at::Tensor trained = table.clone();
    const SaveReport report = save(state, path("b"), {.base = path("a"), .changed_rows = true});
    EXPECT_EQ(report.nbytes_written, whole.nbytes_written - report.nbytes_linked);
    EXPECT_EQ(report.nbytes_linked, (20'000u - 2) * 8 * 4);
    std::filesystem::remove_all(path("a"));
    table.zero_();
    load(state, path("b"));
    EXPECT_TRUE(torch::equal(table, trained));
  });
}

TEST(TrainStateTest, OneTrainerAtATimeWritesADirectory) {
  const test::TemporaryDirectory directory;
  torch::nn::Linear model(2, 2);
  TrainState first(model);
  save(first, directory.path() + "/a");
  {
    TrainState second(model);
    EXPECT_THAT(error_of([&] { save(second, directory.path() + "/b"); }),
                HasSubstr(directory.path()));
  }
  save(first, directory.path() + "/b");
}

// Shows E4.
TEST(TrainStateTest, TheLatestValidIsFoundAndOldOnesGo) {
  const test::TemporaryDirectory directory;
  on(kFullOn2, [&](const dist::Mesh& mesh, Trainer& trainer) {
    TrainState state(trainer.model, *trainer.optimizer);
    for (const int step : {8, 9, 10, 11}) {
      save(state, directory.path() + "/step-" + std::to_string(step), {.keep_last = 3});
    }
    if (mesh.rank() == 0) std::filesystem::remove(directory.path() + "/step-11/rank-00001.h5");
    mesh.world()->max(0, "removed");
    const auto latest = formats::latest_valid(FileSystem::posix(), directory.path());
    EXPECT_EQ(latest.path, directory.path() + "/step-10");
    ASSERT_EQ(latest.skipped.size(), 1U);
    EXPECT_THAT(latest.skipped[0].path, HasSubstr("step-11"));
    const LoadSummary summary = load(state, latest);
    EXPECT_EQ(summary.path, latest.path);
    EXPECT_THAT(summary_to_string(summary), HasSubstr("\n" + latest.skipped[0].path +
                                                      ": skipped checkpoint: expected a valid "
                                                      "checkpoint, found " +
                                                      latest.skipped[0].why));
  });
  EXPECT_EQ(FileSystem::posix().list_directory(directory.path()),
            (std::vector<std::string>{"step-10", "step-11", "step-9"}));
  torch::nn::Linear model(2, 2);
  TrainState state(model);
  const test::TemporaryDirectory empty;
  EXPECT_THAT(
      error_of([&] { load(state, formats::latest_valid(FileSystem::posix(), empty.path())); }),
      HasSubstr("expected a valid checkpoint"));
}

// Shows E7.
TEST(TrainStateTest, OneReportOnAllRanks) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  on(kFullOn2, [&](const dist::Mesh& /*mesh*/, Trainer& trainer) {
    trainer.train(1);
    TrainState state(trainer.model, *trainer.optimizer);
    save(state, path);
  });
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    test::Transformer model(2, 12);  // a layer less, and wider
    fully_shard(*model, {.mesh = mesh});
    torch::optim::AdamW optimizer(test::unique_parameters(*model), torch::optim::AdamWOptions(0.1));
    int step = 0;
    auto state = TrainState{model, optimizer}.with("step", step);
    const std::string error = error_of([&] { load(state, path); });
    EXPECT_THAT(error, HasSubstr(path));
    EXPECT_THAT(error, HasSubstr("model.blocks.0.up.weight: shape"));
    EXPECT_THAT(error, HasSubstr("model.blocks.2.up.weight: unexpected"));
    EXPECT_THAT(error, HasSubstr("step: missing"));
    EXPECT_THAT(error, HasSubstr("in the saved groups"));
  });
  on(kFullOn2, [&](const dist::Mesh& /*mesh*/, Trainer& trainer) {
    TrainState state(trainer.model);  // without the optimizer
    EXPECT_THAT(error_of([&] { load(state, path); }), HasSubstr("unexpected"));
    EXPECT_EQ(error_of([&] { load(state, path, {.allow_unexpected = true}); }), "none");
    TrainState both(trainer.model, *trainer.optimizer);
    EXPECT_EQ(error_of([&] { load(both, path, {.only = {"model.*"}}); }), "none");
    EXPECT_TRUE(trainer.optimizer->state().empty());
  });
}

// This happens if one host sees a new directory later than another.
// Shows E7.
TEST(TrainStateTest, RanksThatLoadDifferentCheckpointsAreRefused) {
  const test::TemporaryDirectory directory;
  on(kFullOn2, [&](const dist::Mesh& mesh, Trainer& trainer) {
    TrainState state(trainer.model, *trainer.optimizer);
    save(state, directory.path() + "/step-1");
    trainer.train(1);
    save(state, directory.path() + "/step-2");
    const std::string own = mesh.rank() == 0 ? "/step-2" : "/step-1";
    const std::string error = error_of([&] { load(state, directory.path() + own); });
    EXPECT_THAT(error, HasSubstr("'step-2'"));
    EXPECT_THAT(error, HasSubstr("'step-1' on rank 1"));
    EXPECT_EQ(error_of([&] { load(state, directory.path() + "/step-2/"); }), "none");
  });
}

// Shows E7.
TEST(TrainStateTest, RanksThatSaveOtherValuesOrToOtherPathsAreRefused) {
  const test::TemporaryDirectory directory;
  const auto refusal_of = [&](const auto& prepare, const std::string& path_of_1 = "/a") {
    std::string of_rank_0;
    on(kFullOn2, [&](const dist::Mesh& mesh, Trainer& trainer) {
      TrainState state(trainer.model, *trainer.optimizer);
      std::int64_t number = 1;
      prepare(state, number, mesh.rank());
      const std::string error =
          error_of([&] { save(state, directory.path() + (mesh.rank() == 1 ? path_of_1 : "/a")); });
      EXPECT_NE(error, "none") << "rank " << mesh.rank();
      if (mesh.rank() == 0) of_rank_0 = error;
    });
    return of_rank_0;
  };
  for (const int rank : {0, 1}) {
    EXPECT_THAT(refusal_of([&](TrainState& state, std::int64_t& number, int own) {
                  if (own == rank) state.with("extra", number);
                }),
                HasSubstr("extra"));
    EXPECT_THAT(refusal_of([&](TrainState& state, std::int64_t& number, int own) {
                  if (own == rank) state.per_rank("extra", number);
                }),
                HasSubstr("extra of each rank"));
  }
  EXPECT_THAT(refusal_of([](TrainState&, std::int64_t&, int) {}, "/b"), HasSubstr("b on rank 1"));
  EXPECT_TRUE(FileSystem::posix().list_directory(directory.path()).empty());
}

// Shows E7.
TEST(TrainStateTest, AValueOfAnotherTypeIsNamed) {
  const test::TemporaryDirectory directory;
  torch::nn::Linear model(2, 2);
  std::int64_t number = 3;
  TrainState state(model);
  save(state.with("step", number), directory.path() + "/a");
  std::string text;
  TrainState other(model);
  EXPECT_THAT(error_of([&] { load(other.with("step", text), directory.path() + "/a"); }),
              HasSubstr("step: value: expected a value that can be loaded, found value: expected a "
                        "string, found 3"));
}

// Shows E4.
TEST(TrainStateTest, ACheckpointThatIsReplacedDuringALoadIsRefused) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  torch::nn::Linear model(2, 2);
  TrainState state(model);
  std::int64_t step = 3;
  state.with("step", step);
  for (const char* const name : {"/a", "/b"}) save(state, directory.path() + name);
  // Called when the checkpoint is open and the tensors have not been read.
  Stateful replacing = stateful(step);
  replacing.check = [&](const Value&) {
    std::filesystem::rename(path, directory.path() + "/old");
    std::filesystem::rename(directory.path() + "/b", path);
  };
  TrainState other(model);
  EXPECT_THAT(error_of([&] { load(other.with("step", replacing), path); }),
              HasSubstr("expected the file as it was before it was opened"));
}

// Shows E4.
TEST(TrainStateTest, ReplacingTakesCheckpointsAlone) {
  const test::TemporaryDirectory directory;
  torch::nn::Linear model(2, 2);
  TrainState state(model);
  const SaveOptions replacing{.overwrite = OverwritePolicy::replace};
  const std::string path = directory.path() + "/runs/a";
  std::filesystem::create_directories(directory.path() + "/runs");
  save(state, path);
  EXPECT_THAT(error_of([&] { save(state, directory.path() + "/runs", replacing); }),
              HasSubstr("it was not changed"));
  std::filesystem::create_directories(directory.path() + "/mine");
  std::ofstream(directory.path() + "/mine/notes.txt") << "text";
  EXPECT_THAT(error_of([&] { save(state, directory.path() + "/mine", replacing); }),
              HasSubstr("it was not changed"));
  EXPECT_TRUE(std::filesystem::exists(directory.path() + "/mine/notes.txt"));
  // A checkpoint that latest_valid skips can still be replaced.
  std::filesystem::resize_file(path + "/rank-00000.h5", 100);
  EXPECT_THAT(error_of([&] { save(state, path); }), HasSubstr("OverwritePolicy::replace"));
  save(state, path, replacing);
  std::filesystem::remove(path + "/index.h5");
  save(state, path, replacing);
  EXPECT_EQ(error_of([&] { load(state, path); }), "none");
  EXPECT_THAT(error_of([&] { save(state, directory.path() + "/b", {.keep_last = -1}); }),
              HasSubstr("keep_last"));
}

struct Heard final : c10::WarningHandler {
  void process(const c10::Warning& warning) override { text += warning.msg(); }
  std::string text;
};

// Shows E13.
TEST(TrainStateTest, AnOlderCheckpointThatStaysIsAWarning) {
  Heard heard;
  const c10::WarningUtils::WarningHandlerGuard guard(&heard);
  const test::TemporaryDirectory directory;
  torch::nn::Linear model(2, 2);
  TrainState state(model);
  save(state, directory.path() + "/step-1");
  std::ofstream(directory.path() + "/step-1/notes.txt") << "mine";
  save(state, directory.path() + "/step-2", {.keep_last = 1});
  EXPECT_THAT(heard.text,
              HasSubstr("step-1: older checkpoint: not removed, because 'notes.txt' in its"));
  EXPECT_TRUE(std::filesystem::exists(directory.path() + "/step-1/notes.txt"));
}

// Shows C7.
TEST(TrainStateTest, AGroupWithoutParametersThatFlatteningLeavesOutIsAWarning) {
  torch::nn::Linear model(2, 2);
  torch::optim::SGD optimizer(
      std::vector<torch::optim::OptimizerParamGroup>{
          {parameters(*model)}, torch::optim::OptimizerParamGroup(std::vector<at::Tensor>())},
      torch::optim::SGDOptions(0.1));
  const StateDict nested = optim_state_dict(*model, optimizer);
  Heard heard;
  const c10::WarningUtils::WarningHandlerGuard guard(&heard);
  flatten_optim_state_dict(nested);
  EXPECT_THAT(heard.text, HasSubstr("param_groups.1 has no parameters"));
}

// Shows E13.
TEST(TrainStateTest, ElementsThatACastMakesZeroAreNoted) {
  const test::TemporaryDirectory directory;
  torch::nn::Linear model(2, 2);
  torch::nn::init::constant_(model->weight, 1e-9);
  TrainState state(model);
  save(state, directory.path() + "/a");
  torch::nn::Linear half(2, 2);
  half->to(torch::kFloat16);
  TrainState other(half);
  EXPECT_THAT(summary_to_string(load(other, directory.path() + "/a", {.allow_cast = true})),
              HasSubstr("model.weight: cast: expected numbers that float16 can hold, found 4 "
                        "elements of this rank that became zero"));
  EXPECT_THAT(summary_to_string(load(state, directory.path() + "/a", {.allow_cast = true})),
              Not(HasSubstr("became zero")));
}

// Shows E13.
TEST(TrainStateTest, AFailureThatNobodyAskedForIsAWarning) {
  Heard heard;
  const c10::WarningUtils::WarningHandlerGuard guard(&heard);
  const test::TemporaryDirectory directory;
  torch::nn::Linear model(2, 2);
  test::FaultFileSystem failing(FileSystem::posix(), directory.path());
  // If one of the first operations fails, the call itself throws.
  for (int i = 0; i < 100 && heard.text.empty(); ++i) {
    TrainState state(model);
    failing.fail_operation(i, test::FaultFileSystem::Fault::from_then_on);
    error_of(
        [&] { save(state, directory.path() + "/a", {.async = true, .file_system = &failing}); });
  }
  EXPECT_THAT(heard.text, HasSubstr("TrainState::wait was not called"));
}

/// Trains a model of 4 inputs for one step.
template <class Model>
void train_on_ones(Model& model, torch::optim::Optimizer& optimizer) {
  optimizer.zero_grad();
  model->forward(torch::ones({1, 4})).sum().backward();
  optimizer.step();
}

// Shows E7.
TEST(TrainStateTest, WhatIsNotLoadedOfAnOptimizerStaysAsItIs) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  torch::nn::Sequential model(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.1));
  {
    train_on_ones(model, optimizer);
    TrainState state(model, optimizer);
    save(state, path);
  }
  torch::optim::AdamW other(model->parameters(), torch::optim::AdamWOptions(0.2));
  train_on_ones(model, other);
  train_on_ones(model, other);
  const StateDict before = optim_state_dict(*model, other);
  const StateDict saved = optim_state_dict(*model, optimizer);
  TrainState state(model, other);
  load(state, path, {.only = {"optim.state.0.weight.*", "optim.state.0.bias.*"}});
  StateDict after = optim_state_dict(*model, other);
  for (const char* name : {"exp_avg", "exp_avg_sq", "step"}) {
    for (const std::string parameter : {"0.weight", "1.weight"}) {
      const std::string fqn = "state." + parameter + "." + name;
      EXPECT_TRUE(after.tensor(fqn).equal((parameter[0] == '0' ? saved : before).tensor(fqn)))
          << fqn;
    }
  }
  EXPECT_EQ(other.param_groups()[0].options().get_lr(), 0.2);
  // A checkpoint of the model alone.
  TrainState of_model(model);
  save(of_model, directory.path() + "/b");
  EXPECT_THAT(error_of([&] { load(state, directory.path() + "/b"); }),
              HasSubstr("0.weight: missing: expected a parameter group that has it"));
  load(state, directory.path() + "/b", {.allow_missing = true});
  test::expect_same_state(optim_state_dict(*model, other), after, "model alone");
  // Amsgrad needs state that the checkpoint does not have.
  torch::optim::AdamW amsgrad(model->parameters(), torch::optim::AdamWOptions(0.1).amsgrad(true));
  train_on_ones(model, amsgrad);
  const StateDict of_amsgrad = optim_state_dict(*model, amsgrad);
  TrainState wants_more(model, amsgrad);
  EXPECT_THAT(error_of([&] { load(wants_more, path); }),
              HasSubstr("optim.state.0.weight.max_exp_avg_sq: missing"));
  EXPECT_THAT(summary_to_string(load(wants_more, path, {.allow_missing = true})),
              HasSubstr("optim.state.0.weight.max_exp_avg_sq: missing"));
  const StateDict loaded = optim_state_dict(*model, amsgrad);
  for (const std::string parameter : {"state.0.weight", "state.1.bias"}) {
    for (const char* name : {".exp_avg", ".exp_avg_sq", ".step"}) {
      EXPECT_TRUE(loaded.tensor(parameter + name).equal(saved.tensor(parameter + name)));
    }
    EXPECT_TRUE(loaded.tensor(parameter + ".max_exp_avg_sq")
                    .equal(of_amsgrad.tensor(parameter + ".max_exp_avg_sq")));
  }
}

// With amsgrad, the first step after the load makes the maximum, as the first step of a run does.
// Shows E7.
TEST(TrainStateTest, MomentsWithoutTheirMaximumAreLoadedIntoANewOptimizer) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  torch::nn::Linear model(4, 3);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.1));
  train_on_ones(model, optimizer);
  TrainState state(model, optimizer);
  save(state, path);
  const StateDict saved = optim_state_dict(*model, optimizer);
  for (const bool loads_groups : {false, true}) {
    torch::optim::AdamW amsgrad(model->parameters(), torch::optim::AdamWOptions(0.1).amsgrad(true));
    TrainState wants_more(model, amsgrad);
    LoadOptions options{.allow_missing = true};
    if (!loads_groups) options.only = {"optim.state.*"};
    load(wants_more, path, options);
    const StateDict loaded = optim_state_dict(*model, amsgrad);
    for (const char* name : {"state.bias.exp_avg", "state.bias.exp_avg_sq", "state.bias.step"}) {
      EXPECT_TRUE(loaded.contains(name) && loaded.tensor(name).equal(saved.tensor(name))) << name;
    }
    // The saved groups say that amsgrad is off.
    EXPECT_EQ(loaded.contains("state.bias.max_exp_avg_sq"), !loads_groups);
    train_on_ones(model, amsgrad);
    const StateDict after = optim_state_dict(*model, amsgrad);
    if (loads_groups) continue;
    EXPECT_TRUE(
        after.tensor("state.bias.max_exp_avg_sq").equal(after.tensor("state.bias.exp_avg_sq")));
  }
}

// Without its second moment, Adam would make a huge step: so the first one is not loaded either.
// Shows E7.
TEST(TrainStateTest, MomentsOfWhichOneIsMissingStayAsTheyAre) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  torch::nn::Linear model(4, 3);
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.1));
  train_on_ones(model, optimizer);
  StateDict saved;
  for (const StateDict::Item& item : optim_state_dict(*model, optimizer)) {
    formats::KeyPath key_path = item.key_path;
    key_path.insert(key_path.begin(), std::string("optim"));
    if (item.fqn != "state.bias.exp_avg_sq") saved.set("optim." + item.fqn, item.entry, key_path);
  }
  for (const StateDict::Item& item : state_dict(*model)) saved.set("model." + item.fqn, item.entry);
  save(saved, path);
  train_on_ones(model, optimizer);
  const StateDict before = optim_state_dict(*model, optimizer);
  TrainState state(model, optimizer);
  const std::string told = summary_to_string(load(state, path, {.allow_missing = true}));
  EXPECT_THAT(told, HasSubstr("optim.state.bias.exp_avg_sq: missing"));
  EXPECT_THAT(told, HasSubstr("optim.state.bias: incomplete: expected all of the state that the "
                              "optimizer needs, found only a part: it stays as it is"));
  EXPECT_THAT(told, Not(HasSubstr("optim.state.weight: incomplete")));
  const StateDict after = optim_state_dict(*model, optimizer);
  for (const char* name : {"state.bias.exp_avg", "state.bias.exp_avg_sq", "state.bias.step"}) {
    EXPECT_TRUE(after.tensor(name).equal(before.tensor(name))) << name;
  }
}

// Shows E7.
TEST(TrainStateTest, WhatIsMissingAndStaysIsNoted) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  torch::nn::Linear model(2, 2);
  save(TrainState(model), path);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  std::int64_t step = 7;
  std::int64_t seen = 8;
  TrainState state(model, optimizer);
  state.with("step", step).per_rank("seen", seen);
  const std::string told = summary_to_string(load(state, path, {.allow_missing = true}));
  EXPECT_THAT(told, HasSubstr(path + ": step: missing: expected a value, found none"));
  EXPECT_THAT(told, HasSubstr(path + ": seen: missing: expected a value of each rank, found none"));
  EXPECT_THAT(told, HasSubstr(path + ": optim.param_groups: missing: expected parameter groups, "
                                     "found none"));
  EXPECT_THAT(told, Not(HasSubstr("weight")));
  EXPECT_EQ(step, 7);
  EXPECT_EQ(seen, 8);
  // The groups are there, but one parameter is in none of them.
  torch::nn::Sequential longer(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
  torch::optim::SGD of_part(longer->ptr(0)->parameters(), 0.1);
  save(TrainState(longer, of_part), directory.path() + "/part");
  torch::optim::SGD of_all(longer->parameters(), 0.1);
  TrainState all(longer, of_all);
  EXPECT_THAT(summary_to_string(load(all, directory.path() + "/part", {.allow_missing = true})),
              HasSubstr("1.weight: missing: expected a parameter group that has it, found none"));
}

// Shows C2.
TEST(TrainStateTest, APartOfAUnitIsSavedByAllRanks) {
  struct WithBackboneImpl : torch::nn::Module {
    WithBackboneImpl() {
      backbone = register_module(
          "backbone", torch::nn::Sequential(torch::nn::Linear(5, 3), torch::nn::BatchNorm1d(3)));
      head = register_module("head", torch::nn::Linear(3, 2));
    }
    torch::nn::Sequential backbone{nullptr};
    torch::nn::Linear head{nullptr};
  };
  for (const bool is_replicated : {false, true}) {
    const test::TemporaryDirectory directory;
    const std::string path = directory.path() + "/a";
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      const auto model = std::make_shared<WithBackboneImpl>();
      {
        const at::NoGradGuard no_grad;
        for (at::Tensor& each : model->parameters()) each.copy_(torch::rand_like(each) + 1);
        for (at::Tensor& each : model->parameters()) mesh.world()->broadcast(each, 0, "").wait();
      }
      const StateDict before = state_dict(*model->backbone);
      if (is_replicated) {
        replicate(*model, {.mesh = mesh});
      } else {
        fully_shard(*model, {.mesh = mesh});
      }
      EXPECT_EQ(mesh_of(*model->backbone).world_size(), 2);
      EXPECT_EQ(state_dict(*model->backbone, {.rank0_only = true}).empty(), mesh.rank() == 1);
      const at::Tensor mean = model->backbone->named_buffers()["1.running_mean"];
      mean.fill_(mesh.rank());
      sync_buffers(*model->backbone, BufferSync::mean);
      EXPECT_TRUE(mean.eq(0.5).all().item<bool>());
      TrainState state(model->backbone);
      save(state, path);
      torch::nn::Sequential plain(torch::nn::Linear(5, 3), torch::nn::BatchNorm1d(3));
      TrainState of_plain(plain);
      load(of_plain, path);
      {
        const at::NoGradGuard no_grad;
        for (at::Tensor& each : model->backbone->parameters()) each.zero_();
      }
      load(state, path);
      const StateDict loaded = state_dict(*model->backbone);
      for (const char* name : {"0.weight", "0.bias", "1.weight"}) {
        EXPECT_TRUE(state_dict(*plain).tensor(name).equal(before.tensor(name))) << name;
        EXPECT_TRUE(loaded.tensor(name).equal(before.tensor(name))) << name;
      }
    });
  }
}

// The tied weight is a shard of the backbone's unit, but the head is outside of the backbone.
// Shows C2.
TEST(TrainStateTest, AShardWithoutItsUnitIsRefusedByName) {
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    torch::nn::Linear backbone(4, 4);
    test::TiedHead head(backbone->weight);
    fully_shard(*backbone, {.mesh = mesh});
    const test::TemporaryDirectory directory;
    const auto expected = HasSubstr(
        "weight: sharded parameter: expected a module that contains the sharded module, found one "
        "that does not");
    TrainState state(head);
    EXPECT_THAT(error_of([&] { save(state, directory.path() + "/a"); }), expected);
    EXPECT_THAT(error_of([&] { state_dict(*head); }), expected);
    // Also if the module has the ranks of another unit, which it contains.
    head->register_module("more", torch::nn::Linear(4, 4));
    fully_shard(*head->named_children()["more"], {.mesh = mesh});
    TrainState with_unit(head);
    EXPECT_THAT(error_of([&] { save(with_unit, directory.path() + "/a"); }), expected);
    EXPECT_THAT(error_of([&] { state_dict(*head); }), expected);
    EXPECT_THAT(error_of([&] { state_dict(*head, {.rank0_only = true}); }), expected);
  });
}

// Shows E7.
TEST(TrainStateTest, AParameterLosesItsStateOnlyIfItIsLoadedAsOneWithoutState) {
  const test::TemporaryDirectory directory;
  const test::TemporaryDirectory other_directory;
  torch::nn::Sequential model(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.1));
  TrainState state(model, optimizer);
  save(state, directory.path() + "/first");  // groups, but no state
  {
    torch::nn::Sequential part(torch::nn::Linear(4, 3));
    torch::optim::AdamW of_part(part->parameters(), torch::optim::AdamWOptions(0.3));
    TrainState state_of_part(part, of_part);
    save(state_of_part, other_directory.path() + "/part");
  }
  model->forward(torch::ones({1, 4})).sum().backward();
  optimizer.step();
  const StateDict before = optim_state_dict(*model, optimizer);
  const auto names_of_state = [&] {
    std::set<std::string> names;
    for (const StateDict::Item& item : optim_state_dict(*model, optimizer)) {
      if (item.fqn.starts_with("state.")) names.insert(item.fqn.substr(0, item.fqn.rfind('.')));
    }
    return names;
  };
  load(state, directory.path() + "/first", {.only = {"optim.param_groups.*"}});
  test::expect_same_state(optim_state_dict(*model, optimizer), before, "groups alone");
  load(state, other_directory.path() + "/part", {.allow_missing = true});
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.3);
  EXPECT_THAT(names_of_state(), ::testing::ElementsAre("state.1.bias", "state.1.weight"));
  load(state, directory.path() + "/first", {.only = {"optim.*"}});
  EXPECT_THAT(names_of_state(), ::testing::IsEmpty());
}

// Shows E7.
TEST(TrainStateTest, OtherNamesAndDtypesAreForTheCallerToAllow) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  torch::nn::Linear model(4, 3);
  TrainState state(model);
  save(state, path);
  torch::nn::Linear half(4, 3);
  half->to(at::kBFloat16);
  TrainState of_half(half);
  EXPECT_THAT(error_of([&] { load(of_half, path); }), HasSubstr("model.weight: dtype"));
  load(of_half, path, {.allow_cast = true});
  EXPECT_TRUE(half->weight.equal(model->weight.to(at::kBFloat16)));
  torch::nn::Sequential nested(torch::nn::Linear(4, 3));
  TrainState of_nested(nested);
  load(of_nested, path, {.renames = {{"model.", "model.0."}}});
  EXPECT_TRUE(nested->parameters()[0].equal(model->weight));
}

// This happens if each host has a disk of its own, and one disk has another run's checkpoint.
// Shows E7.
TEST(TrainStateTest, RanksThatLoadDifferentRunsUnderOneNameAreRefused) {
  const test::TemporaryDirectory directory;
  for (const char* run : {"/first", "/second"}) {
    std::filesystem::create_directory(directory.path() + run);
  }
  struct Way {
    formats::Format format;
    std::string name;
  };
  for (const auto& [format, name] :
       {Way{formats::Format::native, "/step-1"}, Way{formats::Format::dcp, "/dcp-1"},
        Way{formats::Format::safetensors, "/1.safetensors"},
        Way{formats::Format::torch_zip, "/1.pt"}}) {
    const std::string first = directory.path() + "/first" + name;
    const std::string second = directory.path() + "/second" + name;
    const std::string copy = directory.path() + "/copy of " + name.substr(1);
    on(kFullOn2, [&](const dist::Mesh& mesh, Trainer& trainer) {
      for (const std::string& path : {first, second}) {
        TrainState state(trainer.model, *trainer.optimizer);
        trainer.train(1);
        save(state, path, {.format = format});
      }
      if (mesh.rank() == 0) {
        std::filesystem::copy(first, copy, std::filesystem::copy_options::recursive);
        if (format == formats::Format::safetensors) {
          std::filesystem::copy(first + ".values.json", copy + ".values.json");
        }
      }
      mesh.world()->max(0, "copied");
      TrainState state(trainer.model, *trainer.optimizer);
      EXPECT_THAT(error_of([&] { load(state, mesh.rank() == 0 ? first : second); }),
                  HasSubstr("a different checkpoint of that name on rank 1"));
      EXPECT_EQ(error_of([&] { load(state, mesh.rank() == 0 ? first : copy); }), "none");
    });
  }
}

// Shows E7.
TEST(TrainStateTest, ReportsHintAtTheOptionsThatMayBeMeant) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  torch::nn::Sequential model(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
  torch::optim::Adam optimizer(model->parameters());
  int step = 3;
  const auto report_of = [&](TrainState state, const std::string& from) {
    return error_of([&] { load(state, from); });
  };
  {
    TrainState state(model, optimizer);
    save(state.with("step", step), path);
  }
  EXPECT_THAT(
      report_of(TrainState{model}, path),
      ::testing::EndsWith("\n  hint: .only = {\"model\"} loads only what this TrainState has"));
  EXPECT_THAT(report_of(TrainState{model}.with("step", step), path),
              HasSubstr(".only = {\"model\", \"step\"}"));
  EXPECT_THAT(report_of(TrainState(model, optimizer).with("stop", step), path),
              HasSubstr("hint: the name in the checkpoint that is nearest to 'stop' is 'step'"));
  torch::nn::Sequential half(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
  half->to(torch::kBFloat16);
  EXPECT_THAT(report_of(TrainState{half}, path),
              ::testing::AllOf(HasSubstr(".only = {\"model\"}"),
                               HasSubstr("hint: .allow_cast = true converts tensors")));
  StateDict flat;
  flat.set("model._flat_param", state_dict(*model).begin()->entry, {"model", "_flat_param"});
  EXPECT_THAT(error_of([&] { save(flat, directory.path() + "/flat"); }),
              HasSubstr("without a layout (ckpt-reshard --flat-layout FILE makes"));
  // Checkpoints of a model that was wrapped, bare, or saved under another name.
  for (const std::string prefix : {"", "module.", "model.module.", "model_state_dict."}) {
    SCOPED_TRACE(prefix);
    StateDict saved;
    for (const StateDict::Item& item : state_dict(*model)) {
      saved.set(prefix + item.fqn, item.entry, {prefix + item.fqn});
    }
    const std::string other = directory.path() + "/of-" + prefix;
    save(saved, other);
    EXPECT_THAT(report_of(TrainState{model}, other),
                ::testing::EndsWith("\n  hint: .renames = {{\"" + prefix +
                                    "\", \"model.\"}} loads them under the model's names"));
    TrainState state(model);
    EXPECT_EQ(error_of([&] { load(state, other, {.renames = {{prefix, "model."}}}); }), "none");
    // A tensor that is really missing is reported in addition to the hint.
    saved.erase(prefix + "0.bias");
    save(saved, other + "less");
    const std::string report = report_of(TrainState{model}, other + "less");
    EXPECT_THAT(report, HasSubstr("model.0.bias: missing"));
    EXPECT_THAT(report, HasSubstr(".renames = {{\"" + prefix + "\", \"model.\"}}"));
  }
}

/// Two layers under names that are given.
struct NamedPairImpl : torch::nn::Module {
  NamedPairImpl(const std::string& first_name, const std::string& second_name) {
    first = register_module(first_name, torch::nn::Linear(4, 5));
    second = register_module(second_name, torch::nn::Linear(5, 4));
  }
  at::Tensor forward(const at::Tensor& x) { return second->forward(first->forward(x)); }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(NamedPair);

torch::nn::Sequential blocks_of(const std::string& first, const std::string& second) {
  return torch::nn::Sequential(NamedPair(first, second), NamedPair(first, second));
}

template <class Optimizer>
void train_once(torch::nn::Sequential& model, Optimizer& optimizer) {
  model->forward(torch::ones({1, 4})).sum().backward();
  optimizer.step();
}

// Shows E7.
TEST(TrainStateTest, RenamedLayersAreALineEachAndAHint) {
  const test::TemporaryDirectory directory;
  torch::nn::Sequential saved_model = blocks_of("fc", "out");
  torch::optim::Adam saved_optimizer(parameters(*saved_model));
  train_once(saved_model, saved_optimizer);
  for (const bool is_flattened : {false, true}) {
    SCOPED_TRACE(is_flattened);
    const std::string path = directory.path() + (is_flattened ? "/flattened" : "/nested");
    {
      TrainState state(saved_model, saved_optimizer);
      save(state, path, {.flatten_optimizer_state_dict = is_flattened});
    }
    torch::nn::Sequential model = blocks_of("up", "out");
    torch::optim::Adam optimizer(parameters(*model), torch::optim::AdamOptions(0.5));
    TrainState state(model, optimizer);
    const std::string report = error_of([&] { load(state, path); });
    for (const std::string block : {"0", "1"}) {
      EXPECT_THAT(report,
                  HasSubstr("\n  'model." + block + ".fc.' in the checkpoint, 'model." + block +
                            ".up.' in the model: renamed? 2 tensors have the first name"));
    }
    EXPECT_THAT(report, HasSubstr("names of the optimizer differ in the same way"));
    EXPECT_THAT(report, ::testing::Not(HasSubstr("model.0.fc.weight")));
    EXPECT_THAT(report, ::testing::Not(HasSubstr("optim.state.0.fc")));
    const std::string renames =
        "{{\"model.0.fc.\", \"model.0.up.\"},\n"
        "  {\"model.1.fc.\", \"model.1.up.\"}}";
    EXPECT_THAT(report, ::testing::EndsWith(
                            "hint: these renames load the tensors under the model's names:\n"
                            "  .renames = " +
                            renames));
    // The optimizer's state goes with them.
    load(state, path,
         {.renames = {{"model.0.fc.", "model.0.up."}, {"model.1.fc.", "model.1.up."}}});
    const StateDict expected = optim_state_dict(*saved_model, saved_optimizer);
    const StateDict found = optim_state_dict(*model, optimizer);
    for (const std::string slot : {"exp_avg", "exp_avg_sq", "step"}) {
      EXPECT_TRUE(found.tensor("state.1.up.bias." + slot)
                      .equal(expected.tensor("state.1.fc.bias." + slot)));
    }
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 1e-3);
    EXPECT_TRUE(model->parameters()[0].equal(saved_model->parameters()[0]));
  }
}

// Shows E7.
TEST(TrainStateTest, ARenamedNumberOfALayerIsNoNumberOfAGroup) {
  const test::TemporaryDirectory directory;
  const auto model_of = [](const std::string& name) {
    return torch::nn::Sequential(
        torch::nn::SequentialImpl({{name, torch::nn::AnyModule(torch::nn::Linear(4, 3))}}));
  };
  torch::nn::Sequential saved_model = model_of("0");
  torch::optim::Adam saved_optimizer(parameters(*saved_model));
  train_once(saved_model, saved_optimizer);
  for (const bool is_flattened : {false, true}) {
    SCOPED_TRACE(is_flattened);
    const std::string path = directory.path() + (is_flattened ? "/flattened" : "/nested");
    {
      TrainState state(saved_model, saved_optimizer);
      save(state, path, {.flatten_optimizer_state_dict = is_flattened});
    }
    for (const bool is_whole : {false, true}) {  // renames one layer, or all layers
      const std::shared_ptr<torch::nn::Module> model =
          is_whole ? torch::nn::ModuleList(torch::nn::Sequential(torch::nn::Linear(4, 3))).ptr()
                   : std::shared_ptr<torch::nn::Module>(model_of("1").ptr());
      torch::optim::Adam optimizer(parameters(*model), torch::optim::AdamOptions(0.5));
      TrainState state(model, optimizer);
      const std::string to = is_whole ? "model.0." : "model.1.";
      load(state, path, {.renames = {{is_whole ? "model." : "model.0.", to}}});
      EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 1e-3);
      EXPECT_TRUE(optim_state_dict(*model, optimizer)
                      .tensor("state." + to.substr(6) + (is_whole ? "0." : "") + "weight.exp_avg")
                      .equal(optim_state_dict(*saved_model, saved_optimizer)
                                 .tensor("state.0.weight.exp_avg")));
    }
  }
}

// Shows E7.
TEST(TrainStateTest, NothingOfAnOptimizerIsLeftOutSilently) {
  const test::TemporaryDirectory directory;
  torch::nn::Sequential saved_model(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
  torch::optim::SGD saved_optimizer(parameters(*saved_model), 0.1);  // no state, but groups
  for (const bool is_flattened : {false, true}) {
    SCOPED_TRACE(is_flattened);
    const std::string path = directory.path() + (is_flattened ? "/flattened" : "/nested");
    {
      TrainState state(saved_model, saved_optimizer);
      save(state, path, {.flatten_optimizer_state_dict = is_flattened});
    }
    torch::nn::Sequential model(torch::nn::Linear(4, 3));
    torch::optim::SGD optimizer(parameters(*model), 0.2);
    TrainState state(model, optimizer);
    const std::vector<std::string> only_optimizer = {"optim.*"};
    const std::string expected =
        is_flattened ? "optim.param_groups.1.bias.lr: unexpected: the checkpoint has a value of "
                       "this name, but the optimizer does not"
                     : "optim.param_groups.0.params: unexpected: the checkpoint has parameter "
                       "'1.bias', but the optimizer does not";
    EXPECT_THAT(error_of([&] { load(state, path, {.only = only_optimizer}); }),
                HasSubstr(expected));
    const LoadSummary summary =
        load(state, path, {.allow_unexpected = true, .only = only_optimizer});
    EXPECT_THAT(summary_to_string(summary), HasSubstr(expected));
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.1);
    // Without a filter the whole model is loaded, and the report has the model's own names.
    const std::string report = error_of([&] { load(state, path); });
    EXPECT_THAT(report, HasSubstr("model.1.bias: unexpected: the checkpoint has a tensor of this "
                                  "name, but the model does not"));
  }
  const StateDict all = optim_state_dict(*saved_model, saved_optimizer);
  torch::nn::Sequential layer(torch::nn::Linear(4, 3));
  torch::optim::SGD optimizer(parameters(*layer), 0.2);
  EXPECT_THAT(error_of([&] { load_optim_state_dict(*layer, optimizer, all); }),
              HasSubstr("param_groups.0.params: unexpected: the state dict has parameter "
                        "'1.weight', but the optimizer does not"));
  load_optim_state_dict(*layer, optimizer, all, {.allow_unexpected = true});
}

// Shows E7.
TEST(TrainStateTest, NamesThatCouldBeSeveralAreNotHintedAt) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  torch::nn::Sequential saved_model(
      torch::nn::SequentialImpl({{"a", torch::nn::AnyModule(torch::nn::Linear(4, 4))},
                                 {"b", torch::nn::AnyModule(torch::nn::Linear(4, 4))}}));
  torch::nn::Sequential model(
      torch::nn::SequentialImpl({{"c", torch::nn::AnyModule(torch::nn::Linear(4, 4))},
                                 {"d", torch::nn::AnyModule(torch::nn::Linear(4, 4))}}));
  {
    TrainState state(saved_model);
    save(state, path);
  }
  TrainState state(model);
  const std::string report = error_of([&] { load(state, path); });
  EXPECT_THAT(report, ::testing::Not(HasSubstr("renames")));
  EXPECT_THAT(report, HasSubstr("model.a.weight: unexpected"));
  EXPECT_THAT(report, HasSubstr("model.c.weight: missing"));
}

// Shows E7.
TEST(TrainStateTest, OptimizerStateByNumbersIsRefusedWithAHint) {
  const test::TemporaryDirectory directory;
  torch::nn::Sequential model(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
  torch::optim::Adam optimizer(model->parameters());
  model->forward(torch::ones({1, 4})).sum().backward();
  optimizer.step();
  const StateDict by_id = rekey_optim_state_dict(optim_state_dict(*model, optimizer),
                                                 OptimStateKey::param_id, *model, optimizer);
  EXPECT_THAT(error_of([&] { load_optim_state_dict(*model, optimizer, by_id); }),
              HasSubstr("hint: rekey_optim_state_dict"));
  StateDict all;
  for (const StateDict::Item& item : state_dict(*model)) {
    all.set("model." + item.fqn, item.entry, {"model", item.fqn});
  }
  for (const StateDict::Item& item : by_id) {
    formats::KeyPath path = item.key_path;
    path.insert(path.begin(), "optim");
    all.set("optim." + item.fqn, item.entry, path);
  }
  save(all, directory.path() + "/a.pt", {.format = formats::Format::torch_zip});
  TrainState state(model, optimizer);
  EXPECT_THAT(error_of([&] { load(state, directory.path() + "/a.pt"); }),
              HasSubstr("hint: the checkpoint has numbers instead of parameter names"));
}

// Shows E7.
TEST(TrainStateTest, AFieldThatDoesNotFitIsNamedWithItsPathAndGroup) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  torch::nn::Linear model(2, 2);
  torch::optim::Adam adam(model->parameters());
  {
    TrainState state(model, adam);
    save(state, path);
  }
  torch::optim::SGD sgd(model->parameters(), 0.1);
  TrainState state(model, sgd);
  EXPECT_EQ(error_of([&] { load(state, path); }),
            path +
                ": optim.param_groups: group 0 of the optimizer: momentum: expected a number, "
                "found none");
}

// Shows C2.
TEST(TrainStateTest, AWholeStateDictIsWrittenToOneFile) {
  const test::TemporaryDirectory directory;
  for (const auto& [format, name] : {std::pair{formats::Format::safetensors, "/a.safetensors"},
                                     std::pair{formats::Format::torch_zip, "/a.pt"}}) {
    const std::string path = directory.path() + name;
    std::string optimizer_path = path;
    optimizer_path.insert(path.rfind('/') + 1, "optim-");
    StateDict expected;
    on(kFullOn2, [&](const dist::Mesh& mesh, Trainer& trainer) {
      trainer.train(1);
      save(state_dict(*trainer.model, {.rank0_only = true}), path, {.format = format});
      save(optim_state_dict(*trainer.model, *trainer.optimizer, {.rank0_only = true}),
           optimizer_path, {.format = format});
      const StateDict whole = state_dict(*trainer.model);
      if (mesh.rank() == 0) expected = whole;
      EXPECT_THAT(error_of([&] {
                    save(state_dict(*trainer.model, {.type = SHARDED}), path + "-",
                         {.format = format});
                  }),
                  HasSubstr("a state dict of type FULL"));
      mesh.world()->max(0, "written");
      trainer.train(1);
      TrainState state(trainer.model);
      load(state, path, {.renames = {{"", "model."}}});
      test::expect_same_state(state_dict(*trainer.model), whole, name);
    });
    EXPECT_EQ(formats::open_checkpoint(FileSystem::posix(), optimizer_path)->format(), format);
  }
  torch::nn::Linear plain(2, 2);
  save(state_dict(*plain), directory.path() + "/plain.safetensors",
       {.format = formats::Format::safetensors});
  EXPECT_FALSE(FileSystem::posix().kind_of(directory.path() + "/plain.safetensors.values.json"));
}

// Python trainers without distributed checkpoints often save such a dict.
// Shows E2.
TEST(TrainStateTest, ADictOfStateDictsAndAnEpochIsLoaded) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/checkpoint.pt";
  torch::nn::Linear model(4, 3);
  StateDict saved;
  for (const StateDict::Item& item : state_dict(*model)) {
    saved.set("model_state_dict." + item.fqn, item.entry, {"model_state_dict", item.fqn});
  }
  saved.set("optimizer_state_dict.state.0.exp_avg", StateTensor::whole(torch::ones({3, 4})),
            {"optimizer_state_dict", "state", std::int64_t{0}, "exp_avg"});
  saved.set("epoch", Value(7), {"epoch"});
  save(saved, path, {.format = formats::Format::torch_zip});
  torch::nn::Linear other(4, 3);
  int epoch = 0;
  TrainState state(other);
  state.with("epoch", epoch);
  load(state, path, {.only = {"model.*", "epoch"}, .renames = {{"model_state_dict.", "model."}}});
  EXPECT_EQ(epoch, 7);
  EXPECT_TRUE(other->weight.equal(model->weight));
}

// Shows E7.
TEST(TrainStateTest, ASummaryIsTold) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  torch::nn::Linear model(4, 3);
  {
    TrainState state(model);
    save(state, path);
  }
  TrainState same(model);
  EXPECT_EQ(summary_to_string(load(same, path)), path + ": native of 1 rank, 60 bytes loaded");
  torch::nn::Linear half(4, 3);
  half->to(at::kBFloat16);
  TrainState state(half);
  EXPECT_THAT(
      summary_to_string(load(state, path, {.allow_cast = true})),
      HasSubstr("bytes loaded\n" + path + ": model.bias: dtype: expected bfloat16, found float32"));
}

// Shows C8.
TEST(TrainStateTest, ASeedBeyondSigned64BitsComesBackFromEveryFormat) {
  const test::TemporaryDirectory directory;
  for (const auto& [format, name] :
       {std::pair{formats::Format::native, "/a"}, std::pair{formats::Format::dcp, "/b"},
        std::pair{formats::Format::safetensors, "/a.safetensors"},
        std::pair{formats::Format::torch_zip, "/a.pt"}}) {
    const std::string path = directory.path() + name;
    constexpr std::uint64_t kSeed = 0xFFFFFFFFFFFFFFF1;
    torch::nn::Linear model(2, 2);
    std::uint64_t seed = kSeed;
    std::uint64_t of_rank = kSeed + 1;
    auto state = TrainState(model).with("seed", seed).per_rank("own", of_rank);
    save(state, path, {.format = format});
    seed = of_rank = 0;
    load(state, path);
    EXPECT_EQ(seed, kSeed) << name;
    EXPECT_EQ(of_rank, kSeed + 1) << name;
  }
}

// Shows E7.
TEST(TrainStateTest, NamesOfATiedParameterWithDifferentElementsInACheckpointAreRefused) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a.safetensors";
  const auto write = [&](const at::Tensor& of_head) {
    StateDict saved;
    for (const StateDict::Item& item : state_dict(*test::seeded<test::Transformer>())) {
      if (std::holds_alternative<StateTensor>(item.entry)) {
        saved.set("model." + item.fqn, item.entry);
      }
    }
    saved.set("model.head.weight", StateTensor::whole(of_head));
    save(saved, path,
         {.format = formats::Format::safetensors, .overwrite = OverwritePolicy::replace});
  };
  const at::Tensor weight = test::seeded<test::Transformer>()->embedding->weight.detach().clone();
  const auto load_on = [&](int world_size, const LoadOptions& options, std::string expected) {
    test::on_ranks(world_size, [&](const dist::Mesh& mesh) {
      test::Transformer model = test::sharded_transformer(mesh);
      {
        const at::NoGradGuard no_grad;
        for (at::Tensor& parameter : model->parameters()) parameter.fill_(7);
      }
      TrainState state(model);
      EXPECT_THAT(error_of([&] { load(state, path, options); }), HasSubstr(expected));
      if (expected != "none") return;
      EXPECT_TRUE(state_dict(*model).tensor("head.weight").equal(weight));
    });
  };
  for (const int world_size : {1, 2}) {
    write(weight.clone());
    load_on(world_size, {}, "none");
    at::Tensor other = weight.clone();
    other.view({-1})[weight.numel() - 1] += 1;
    write(other);
    load_on(world_size, {},
            path +
                ": model.head.weight: tied tensors: expected the elements of "
                "model.embedding.weight, because both names are one tensor in the model, found "
                "other elements (to load only the elements of model.embedding.weight, add "
                "\"!model.head.weight\" to LoadOptions::only)");
    load_on(world_size, {.only = {"!model.head.weight"}}, "none");
  }
}

// Shows E13.
TEST(TrainStateTest, OfParametersThatReplicateIgnoresRankZerosAreSaved) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  test::on_ranks(3, [&](const dist::Mesh& mesh) {
    test::Mlp model = test::seeded<test::Mlp>();
    replicate(*model, {.mesh = mesh, .ignored_states = model->middle->parameters()});
    torch::optim::AdamW optimizer(parameters(*model), torch::optim::AdamWOptions(0.1));
    for (int step = 0; step < 2 + mesh.rank(); ++step) {
      // The ignored parameters alone: the ranks step as often as they like.
      optimizer.zero_grad();
      model->middle->forward(torch::ones({1, 13}) * (1 + mesh.rank())).pow(2).sum().backward();
      optimizer.step();
    }
    TrainState state(model, optimizer);
    save(state, path);
    const at::Tensor weight = model->middle->weight.detach();
    const auto moment = [&] {
      return optim_state_dict(*model, optimizer, {.type = LOCAL})
          .tensor("state.middle.weight.exp_avg")
          .clone();
    };
    std::vector<at::Tensor> expected = {weight.clone(), moment(), torch::tensor(2.0F)};
    for (at::Tensor& tensor : expected) mesh.world()->broadcast(tensor, 0, "rank 0's").wait();
    EXPECT_EQ(weight.equal(expected[0]), mesh.rank() == 0);
    EXPECT_TRUE(state_dict(*model).tensor("middle.weight").equal(weight)) << "FULL has own copies";
    EXPECT_TRUE(
        optim_state_dict(*model, optimizer).tensor("state.middle.weight.exp_avg").equal(moment()));
    const StateDict whole = state_dict(*model, {.rank0_only = true});
    const StateDict of_optimizer = optim_state_dict(*model, optimizer, {.rank0_only = true});
    const auto expect_those_of_rank0 = [&] {
      EXPECT_TRUE(weight.equal(expected[0]));
      EXPECT_TRUE(moment().equal(expected[1]));
      EXPECT_TRUE(optim_state_dict(*model, optimizer, {.type = LOCAL})
                      .tensor("state.middle.weight.step")
                      .equal(expected[2]));
    };
    load(state, path);
    expect_those_of_rank0();
    optimizer.step();
    load_state_dict(*model, whole, {.rank0_only = true});
    load_optim_state_dict(*model, optimizer, of_optimizer, {.rank0_only = true});
    expect_those_of_rank0();
  });
}

// Shows E13.
TEST(TrainStateTest, OfStateThatOnlySomeRanksHaveOfIgnoredParametersRankZerosIsSaved) {
  const test::TemporaryDirectory directory;
  for (const int rank_with_state : {0, 1}) {
    SCOPED_TRACE(rank_with_state);
    const std::string path = directory.path() + "/" + std::to_string(rank_with_state);
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      test::Mlp model = test::seeded<test::Mlp>();
      replicate(*model, {.mesh = mesh, .ignored_states = model->middle->parameters()});
      torch::optim::AdamW optimizer(parameters(*model), torch::optim::AdamWOptions(0.1));
      const auto step = [&] {
        model->middle->forward(torch::ones({1, 13})).pow(2).sum().backward();
        optimizer.step();
      };
      const auto moment = [&] {
        const StateDict own = optim_state_dict(*model, optimizer, {.type = LOCAL});
        const bool is_there = own.contains("state.middle.weight.exp_avg");
        return is_there ? own.tensor("state.middle.weight.exp_avg").clone() : at::Tensor();
      };
      TrainState state(model, optimizer);
      save(state, path);  // before there is any state
      if (mesh.rank() == rank_with_state) step();
      at::Tensor expected = rank_with_state == 0 && mesh.rank() == 0
                                ? moment()
                                : torch::zeros_like(model->middle->weight.detach());
      mesh.world()->broadcast(expected, 0, "rank 0's").wait();
      for (const bool async : {false, true}) {
        const bool is_new = rank_with_state == 0 && !async;  // what is saved has more tensors
        EXPECT_EQ(
            save(state, path, {.overwrite = OverwritePolicy::replace, .async = async}).has_planned,
            is_new);
      }
      EXPECT_EQ(moment().defined(), mesh.rank() == rank_with_state) << "a save changes nothing";
      for (int number = 0; number < 2; ++number) {
        load(state, path);
        if (rank_with_state == 0) {
          EXPECT_TRUE(moment().defined() && moment().equal(expected));
        } else {
          EXPECT_FALSE(moment().defined());
        }
        step();
      }
    });
  }
}

/// Two models, side by side in one module, that share a layer.
struct TwoModelsImpl : torch::nn::Module {
  TwoModelsImpl() {
    const torch::nn::Linear shared(3, 3);
    first = register_module("first", torch::nn::Sequential(shared, torch::nn::Linear(3, 2)));
    second = register_module("second", torch::nn::Sequential(shared, torch::nn::Linear(3, 5)));
  }
  at::Tensor forward(const at::Tensor& x) {
    return first->forward(x).sum() + second->forward(x).sum();
  }
  torch::nn::Sequential first{nullptr}, second{nullptr};
};
TORCH_MODULE(TwoModels);

// Shows C2.
TEST(TrainStateTest, ALayerThatTwoShardedModelsShareIsSavedOnce) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    TwoModels model = test::seeded<TwoModels>();
    fully_shard(*model->first, {.mesh = mesh});
    fully_shard(*model->second, {.mesh = mesh});
    torch::optim::AdamW optimizer(parameters(*model), torch::optim::AdamWOptions(0.1));
    const StateDict saved = state_dict(*model);
    TrainState state(model, optimizer);
    save(state, path);
    if (mesh.rank() == 0) {
      const auto reader = formats::open_checkpoint(FileSystem::posix(), path);
      EXPECT_NE(reader->contents().find_tensor("model.first.0.weight"), nullptr);
      EXPECT_EQ(reader->contents().find_tensor("model.second.0.weight"), nullptr);
      EXPECT_EQ(reader->contents().aliases.size(), 2U);
    }
    for (at::Tensor& parameter : model->parameters()) parameter.detach().fill_(77);
    load(state, path);
    test::expect_same_state(state_dict(*model), saved, "loaded");
  });
}

// Shows C2.
TEST(TrainStateTest, AModuleThatStandsInTheTreeTwiceComesBack) {
  struct TwiceInATrainerImpl : torch::nn::Module {
    TwiceInATrainerImpl() {
      const torch::nn::Linear linear(3, 3);
      first = register_module("first", linear);
      second = register_module("second", linear);
    }
    at::Tensor forward(const at::Tensor& x) { return second->forward(first->forward(x)); }
    torch::nn::Linear first{nullptr}, second{nullptr};
  };
  const test::TemporaryDirectory directory;
  const auto run = [&](int world_size, bool is_replicated, const auto& body) {
    test::on_ranks(world_size, [&](const dist::Mesh& mesh) {
      std::shared_ptr<TwiceInATrainerImpl> model;
      test::with_generator([&] {
        torch::manual_seed(2);
        model = std::make_shared<TwiceInATrainerImpl>();
      });
      if (is_replicated) {
        replicate(*model, {.mesh = mesh});
      } else {
        fully_shard(*model, {.mesh = mesh, .policy = ModuleWrapPolicy<torch::nn::Linear>()});
      }
      torch::optim::AdamW optimizer(parameters(*model), torch::optim::AdamWOptions(0.1));
      body(mesh, *model, optimizer, [&] {
        optimizer.zero_grad();
        forward(model, torch::ones({2, 3})).sum().backward();
        optimizer.step();
      });
    });
  };
  for (const auto& [format, name] : {std::pair{formats::Format::native, "/a"},
                                     std::pair{formats::Format::safetensors, "/a.safetensors"}}) {
    for (const bool is_replicated : {false, true}) {
      SCOPED_TRACE(std::string(name) + (is_replicated ? " replicated" : ""));
      const std::string path = directory.path() + (is_replicated ? "/r" : "/s") + (name + 1);
      StateDict saved;
      StateDict of_optimizer;
      run(2, is_replicated, [&](const dist::Mesh& mesh, auto& model, auto& optimizer, auto step) {
        step();
        TrainState state(model.shared_from_this(), optimizer);
        save(state, path, {.format = format});
        const StateDict whole = state_dict(model);
        const StateDict whole_of_optimizer = optim_state_dict(model, optimizer);
        if (mesh.rank() != 0) return;
        saved = whole;
        of_optimizer = whole_of_optimizer;
      });
      run(3, !is_replicated, [&](const dist::Mesh&, auto& model, auto& optimizer, auto step) {
        step();
        step();
        TrainState state(model.shared_from_this(), optimizer);
        load(state, path);
        test::expect_same_state(state_dict(model), saved, "model");
        test::expect_same_state(optim_state_dict(model, optimizer), of_optimizer, "optimizer");
        step();
      });
    }
  }
}

}  // namespace
}  // namespace tessera
