#include "runtime/state/saved_states.h"

#include "runtime/registry/state_tensor_conversion.h"

namespace tessera::test {

void expect_same_shards(const StateDict& found, const StateDict& expected,
                        const std::string& what) {
  EXPECT_EQ(found.size(), expected.size()) << what;
  for (const StateDict::Item& item : expected) {
    const StateEntry* const entry = found.find(item.fqn);
    ASSERT_NE(entry, nullptr) << what << ": " << item.fqn;
    ASSERT_EQ(entry->index(), item.entry.index()) << what << ": " << item.fqn;
    if (const auto* value = std::get_if<Value>(entry)) {
      EXPECT_EQ(*value, std::get<Value>(item.entry)) << what << ": " << item.fqn;
    } else if (const auto* alias = std::get_if<StateAlias>(entry)) {
      EXPECT_EQ(alias->target, std::get<StateAlias>(item.entry).target) << what;
    } else {
      for (const LocalShard& local : std::get<StateTensor>(*entry).local_shards) {
        const auto whole = state::cut(std::get<StateTensor>(item.entry), local.region);
        EXPECT_TRUE(local.tensor.view({-1}).equal(*whole)) << what << ": " << item.fqn;
      }
    }
  }
}

void expect_same_state(const StateDict& found, const StateDict& expected, const std::string& what) {
  EXPECT_EQ(found.size(), expected.size()) << what;
  for (const StateDict::Item& item : expected) {
    const StateEntry* const entry = found.find(item.fqn);
    ASSERT_NE(entry, nullptr) << what << ": " << item.fqn;
    if (const auto* value = std::get_if<Value>(&item.entry)) {
      EXPECT_EQ(std::get<Value>(*entry), *value) << what << ": " << item.fqn;
    } else {
      EXPECT_TRUE(found.tensor(item.fqn).equal(expected.tensor(item.fqn)))
          << what << ": " << item.fqn;
    }
  }
}

SavedRun run_that_saves(const Configuration& configuration, const std::string& path,
                        const RunOptions& options) {
  SavedRun run;
  on_ranks(
      configuration.world_size,
      [&](const dist::Mesh& mesh) {
        Trainer trainer(configuration, mesh, options.kind, options.dtype);
        trainer.train(options.num_steps_before);
        TrainState state(trainer.model, *trainer.optimizer);
        save(state, path, {.format = options.format});
        StateDict whole = trainer.state();
        const std::vector<double> losses = trainer.train(options.num_steps_after);
        if (mesh.rank() == 0) run = {std::move(whole), losses};
      },
      configuration.mesh_options());
  return run;
}

void expect_to_go_on_as(const SavedRun& run, Trainer& trainer, double tolerance,
                        const std::string& what) {
  const std::vector<double> losses = trainer.train(static_cast<int>(run.losses.size()));
  for (std::size_t step = 0; step < losses.size(); ++step) {
    EXPECT_NEAR(losses[step], run.losses[step], tolerance * run.losses[step])
        << what << ", step " << step;
  }
}

}  // namespace tessera::test
