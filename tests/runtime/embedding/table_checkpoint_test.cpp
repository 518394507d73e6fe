#include <gmock/gmock.h>
#include <torch/torch.h>

#include "runtime/embedding/tables.h"
#include "runtime/state/saved_states.h"
#include "support/temporary_directory.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/native.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/job_state.h"
#include "tessera/reshard/planner.h"

// Shows C9, D9. Tables and the rest of a model are saved and loaded together, under any other plan.

namespace tessera {
namespace {

using embedding::FusedOptimizer;
using test::PlanKind;

/// How the part of a model beside the tables is distributed.
enum class Top { fully_sharded, replicated, inside };

/// A model of tables, one of them with the dense kernel, and a linear layer.
struct Trainer {
  Trainer(const dist::Mesh& mesh, const PlanKind& kind, Top top, const FusedOptimizer& fused)
      : rank(mesh.rank()),
        tables(shard(test::small_collection(), test::plan_of(kind, mesh.world_size()), mesh,
                     {.kernel = {{"days", Kernel::dense}}, .optimizer = fused})),
        model(test::model_with(tables)) {
    switch (top) {
      case Top::fully_sharded:
        fully_shard(*model, {.mesh = mesh});
        break;
      case Top::replicated:
        replicate(*model, {.mesh = mesh});
        break;
      case Top::inside:
        replicate(*model->top, {.mesh = mesh});
        fully_shard(*model, {.mesh = mesh});
        break;
    }
    optimizer = std::make_unique<torch::optim::AdamW>(model->parameters(),
                                                      torch::optim::AdamWOptions(0.01));
  }

  void train(int first_step, int num_steps) {
    for (int step = first_step; step < first_step + num_steps; ++step) {
      optimizer->zero_grad();
      test::loss_of(forward(model, test::small_batch(rank, step))).backward();
      optimizer->step();
    }
  }

  StateDict state(const StateDictOptions& options = {}) {
    StateDict all = state_dict(*model, options);
    for (StateDict::Item& item : optim_state_dict(*model, *optimizer, options)) {
      all.set("optim." + item.fqn, item.entry);
    }
    return all;
  }

  int rank;
  std::shared_ptr<ShardedEmbeddingBagCollection> tables;
  test::ModelWithTables model;
  std::unique_ptr<torch::optim::AdamW> optimizer;
};

/// Trains under a plan, saves, and returns the whole state.
StateDict saved(const PlanKind& kind, int world_size, Top top, const FusedOptimizer& fused,
                const std::string& path, formats::Format format = formats::Format::native) {
  StateDict whole;
  test::on_ranks(world_size, [&](const dist::Mesh& mesh) {
    at::set_num_threads(1);
    Trainer trainer(mesh, kind, top, fused);
    trainer.train(0, 2);
    TrainState state(trainer.model, *trainer.optimizer);
    save(state, path, {.format = format});
    StateDict all = trainer.state();
    if (mesh.rank() == 0) whole = std::move(all);
  });
  return whole;
}

/// Loads a checkpoint under every plan at a world size.
void expect_to_load_everywhere(int world_size, const std::string& path, const StateDict& expected,
                               const FusedOptimizer& fused) {
  test::on_ranks(world_size, [&](const dist::Mesh& mesh) {
    at::set_num_threads(1);
    int number = 0;
    for (const PlanKind& to : test::plan_kinds()) {
      const std::string what = path + " as " + to.name + " at " + std::to_string(world_size);
      test::stand_at(what);
      Trainer trainer(mesh, to, static_cast<Top>(number++ % 3), fused);
      TrainState state(trainer.model, *trainer.optimizer);
      load(state, path);
      test::expect_same_shards(trainer.state({.type = SHARDED}), expected, what);
    }
  });
}

// Shows C9, D9.
TEST(TableCheckpointTest, AnyPlanLoadsUnderAnyOther) {
  const FusedOptimizer fused = embedding::RowWiseAdagrad{.lr = 0.1};
  int number = 0;
  for (const PlanKind& from : test::plan_kinds()) {
    const test::TemporaryDirectory directory;
    const std::string path = directory.path() + "/" + from.name;
    const StateDict expected = saved(from, 2 + number % 2, Top::fully_sharded, fused, path);
    ++number;
    for (const int world_size : {1, 2, 3, 4}) {
      expect_to_load_everywhere(world_size, path, expected, fused);
    }
  }
}

// Shows C9, D9.
TEST(TableCheckpointTest, EveryOptimizersStateMoves) {
  for (const FusedOptimizer& fused : test::fused_optimizers()) {
    const test::TemporaryDirectory directory;
    const std::string path = directory.path() + "/saved";
    const StateDict expected = saved(test::plan_kind("mixed"), 3, Top::replicated, fused, path);
    expect_to_load_everywhere(2, path, expected, fused);
  }
}

// Shows C9.
TEST(TableCheckpointTest, ARunGoesOnUnderAnotherPlan) {
  const FusedOptimizer fused = embedding::RowWiseAdagrad{.lr = 0.1};
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/saved";
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    at::set_num_threads(1);
    Trainer trainer(mesh, test::plan_kind("row_wise"), Top::fully_sharded, fused);
    trainer.train(0, 3);
    TrainState state(trainer.model, *trainer.optimizer);
    save(state, path);
    trainer.train(3, 3);
    Trainer other(mesh, test::plan_kind("grid"), Top::replicated, fused);
    TrainState other_state(other.model, *other.optimizer);
    load(other_state, path);
    other.train(3, 3);
    const StateDict expected = trainer.state();
    const StateDict found = other.state();
    for (const StateDict::Item& item : expected) {
      if (std::holds_alternative<Value>(item.entry)) continue;
      EXPECT_TRUE(torch::allclose(found.tensor(item.fqn), expected.tensor(item.fqn), 1e-4, 1e-5))
          << item.fqn;
    }
  });
}

/// Moves a checkpoint as `ckpt-reshard --plan` does.
void reshard_by_plan(const std::string& from, const std::string& to, const TablePlan& plan) {
  FileSystem& fs = FileSystem::posix();
  const auto reader = formats::open_checkpoint(fs, from);
  const reshard::Plan moves = reshard::plan_reshard(reader->contents(), from, {.table_plan = plan});
  ASSERT_TRUE(moves.problems.empty()) << reshard::problems_to_string(moves.problems, 5);
  std::vector<Value> values;
  for (const std::size_t i : moves.value_sources) values.push_back(reader->read_value(i));
  const auto writer = formats::create_native(fs, to, moves.destination, values);
  reshard::execute(moves, *reader, *writer, {});
  writer->commit();
}

// Shows D9.
TEST(TableCheckpointTest, OfflineAnyPlanGivesAnyOther) {
  const FusedOptimizer fused = embedding::RowWiseAdagrad{.lr = 0.1};
  const test::TemporaryDirectory directory;
  const std::string first = directory.path() + "/first";
  const StateDict expected = saved(test::plan_kind("mixed"), 3, Top::fully_sharded, fused, first);
  // Moves from each plan to the next, and from the last to the first.
  std::string path = first;
  int number = 0;
  for (const int world_size : {4, 2, 3}) {
    for (const PlanKind& kind : test::plan_kinds()) {
      const std::string next = directory.path() + "/" + std::to_string(number++);
      reshard_by_plan(path, next, test::plan_of(kind, world_size));
      path = next;
    }
    expect_to_load_everywhere(2, path, expected, fused);
  }
}

// Shows D9.
TEST(TableCheckpointTest, TablesWithoutAnotherOptimizerAreSavedToo) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/saved";
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    at::set_num_threads(1);
    const auto tables_of = [&](const std::string& kind) {
      return shard(test::small_collection(), test::plan_of(test::plan_kind(kind), 2), mesh,
                   {.optimizer = embedding::Adam{.lr = 0.02}});
    };
    const auto tables = tables_of("row_wise");
    test::loss_of(tables->forward(test::small_batch(mesh.rank(), 0)).values()).backward();
    TrainState state(tables);
    save(state, path);
    const auto others = tables_of("column_wise");
    TrainState other_state(others);
    load(other_state, path);
    test::expect_same_shards(optim_state_dict(*others, StateDictOptions{.type = SHARDED}),
                             optim_state_dict(*tables), "state");
    test::expect_same_shards(state_dict(*others, {.type = SHARDED}), state_dict(*tables),
                             "weights");
    const auto wrong = shard(test::small_collection(), test::plan_of(test::plan_kind("grid"), 2),
                             mesh, {.optimizer = embedding::Adagrad{}});
    TrainState wrong_state(wrong);
    EXPECT_THROW(load(wrong_state, path), Error);
  });
}

// The state of fused Sgd is empty, so nothing is lost.
TEST(TableCheckpointTest, APartIsRefusedIfTheCollectionHasStateForIt) {
  const test::TemporaryDirectory directory;
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    const auto save_part = [&](const FusedOptimizer& fused, const std::string& name) {
      const auto tables =
          shard(test::small_collection(), test::plan_of(test::plan_kind("row_wise"), 2), mesh,
                {.kernel = {{"days", Kernel::dense}}, .optimizer = fused});
      TrainState state(tables->named_modules()[name]);
      save(state, directory.path() + "/" + name);
    };
    EXPECT_THAT([&] { save_part(embedding::RowWiseAdagrad{}, "embedding_bags.users"); },
                testing::ThrowsMessage<Error>(testing::HasSubstr(
                    "weight: state of a fused optimizer: expected the collection")));
    save_part(embedding::RowWiseAdagrad{}, "embedding_bags.days");  // dense
    save_part(embedding::Sgd{}, "embedding_bags.users");
  });
}

}  // namespace
}  // namespace tessera
