// State dicts, whole parameters and checkpoints of a model on a device.
#include <gmock/gmock.h>

#include "accelerator/accelerator.h"
#include "runtime/support/checks.h"
#include "support/temporary_directory.h"
#include "tessera/tessera.h"

namespace tessera {
namespace {

using test::Block;
using test::Transformer;
using test::accelerator::device;

class StateOnDeviceTest : public test::AcceleratorTest {};

at::Tensor ids_on(at::Device its_device) {
  return test::some_ids().to(its_device);
}

struct Trainer {
  Trainer(const dist::Mesh& mesh, ShardingStrategy strategy, Offload offload = Offload::none)
      : own(device(mesh.rank())),
        model(sharded(mesh, strategy, offload)),
        optimizer(test::unique_parameters(*model), torch::optim::AdamWOptions(1e-2)) {}
  void step() {
    optimizer.zero_grad();
    forward(model, ids_on(own)).square().mean().backward();
    optimizer.step();
  }
  TrainState state() { return TrainState(model, optimizer); }

  at::Device own;
  Transformer model;
  torch::optim::AdamW optimizer;

 private:
  Transformer sharded(const dist::Mesh& mesh, ShardingStrategy strategy, Offload offload) const {
    Transformer made = test::seeded<Transformer>();
    made->to(own);
    fully_shard(*made, {.mesh = mesh,
                        .policy = ModuleWrapPolicy<Block>(),
                        .strategy = strategy,
                        .offload = offload});
    return made;
  }
};

/// Returns the parameters of the unsharded model after `num_steps` steps on the CPU, by name.
std::map<std::string, at::Tensor> expected_after(int num_steps) {
  Transformer model = test::seeded<Transformer>();
  torch::optim::AdamW optimizer(test::unique_parameters(*model), torch::optim::AdamWOptions(1e-2));
  for (int i = 0; i < num_steps; ++i) {
    optimizer.zero_grad();
    model->forward(ids_on(at::kCPU)).square().mean().backward();
    optimizer.step();
  }
  std::map<std::string, at::Tensor> parameters;
  for (const auto& each : model->named_parameters()) {
    parameters[each.key()] = each.value().detach().clone();
  }
  return parameters;
}

void expect_parameters(torch::nn::Module& model,
                       const std::map<std::string, at::Tensor>& expected) {
  const UnshardedParams whole(model, {.writeback = false});
  for (const auto& each : model.named_parameters()) {
    EXPECT_TRUE(torch::allclose(each.value().detach().cpu(), expected.at(each.key()), 1e-4, 1e-5))
        << each.key();
  }
}

std::vector<ShardingStrategy> strategies() {
  return {FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2};
}

/// Returns the number of ranks to test a strategy on: four if it is hybrid, else at most two.
int num_ranks_for(ShardingStrategy strategy) {
  return strategy == HYBRID_SHARD || strategy == HYBRID_SHARD_ZERO2 ? 4 : test::num_ranks(2);
}

dist::MeshOptions mesh_for(ShardingStrategy strategy) {
  return strategy == HYBRID_SHARD || strategy == HYBRID_SHARD_ZERO2 ? test::two_replicas()
                                                                    : dist::MeshOptions{};
}

TEST_P(StateOnDeviceTest, StateDictsOfEachTypeComeBack) {
  const auto expected = expected_after(2);
  for (const auto strategy : strategies()) {
    SCOPED_TRACE(to_string(strategy));
    const int world_size = num_ranks_for(strategy);
    if (test::num_ranks(world_size) < world_size) continue;
    test::on_devices(
        world_size,
        [&](const dist::Mesh& mesh) {
          Trainer trainer(mesh, strategy);
          for (int i = 0; i < 2; ++i) trainer.step();
          for (const auto type :
               {StateDictType::full, StateDictType::sharded, StateDictType::local}) {
            const StateDict saved =
                state_dict(*trainer.model, {.type = type, .offload_to_cpu = true});
            Trainer other(mesh, strategy);
            load_state_dict(*other.model, saved);
            expect_parameters(*other.model, expected);
          }
        },
        mesh_for(strategy));
    test::accelerator::end();
  }
}

TEST_P(StateOnDeviceTest, UnshardParamsKeepsWhatIsWritten) {
  auto expected = expected_after(1);
  for (auto& each : expected) each.second.mul_(2);
  const auto expect_kept = [&](const dist::Mesh& mesh, ShardingStrategy strategy,
                               const UnshardParamsOptions& options) {
    Trainer trainer(mesh, strategy);
    trainer.step();
    {
      const UnshardedParams whole(*trainer.model, options);
      const at::NoGradGuard no_grad;
      if (!options.rank0_only || mesh.rank() == 0) {
        for (at::Tensor& each : test::unique_parameters(*trainer.model)) each.mul_(2);
      }
    }
    expect_parameters(*trainer.model, expected);
    trainer.step();  // passes still work
  };
  for (const bool is_rank0_only : {false, true}) {
    SCOPED_TRACE(is_rank0_only ? "rank 0 only" : "all ranks");
    for (const bool is_on_cpu : {false, true}) {
      const UnshardParamsOptions options{.rank0_only = is_rank0_only, .offload_to_cpu = is_on_cpu};
      for (const auto strategy : {FULL_SHARD, HYBRID_SHARD}) {
        const int world_size = num_ranks_for(strategy);
        if (test::num_ranks(world_size) < world_size) continue;
        test::on_devices(
            world_size, [&](const dist::Mesh& mesh) { expect_kept(mesh, strategy, options); },
            mesh_for(strategy));
      }
      test::accelerator::end();
    }
  }
}

TEST_P(StateOnDeviceTest, ASaveComesBack) {
  const auto expected = expected_after(3);
  for (const Offload offload : {Offload::none, Offload::params}) {
    const test::TemporaryDirectory directory;
    const std::string path = directory / "step-2";
    test::on_devices(test::num_ranks(2), [&](const dist::Mesh& mesh) {
      Trainer trainer(mesh, FULL_SHARD, offload);
      for (int i = 0; i < 2; ++i) trainer.step();
      save(trainer.state(), path);
    });
    const auto strategy = test::num_ranks(4) == 4 ? HYBRID_SHARD : SHARD_GRAD_OP;
    test::on_devices(
        num_ranks_for(strategy),
        [&](const dist::Mesh& mesh) {
          Trainer trainer(mesh, strategy, offload);
          load(trainer.state(), path);
          trainer.step();  // gives `expected` only if the optimizer's state was loaded too
          expect_parameters(*trainer.model, expected);
        },
        mesh_for(strategy));
    test::accelerator::end();
  }
}

TEST_P(StateOnDeviceTest, ASaveInTheBackgroundHasTheStateOfItsStart) {
  const auto expected = expected_after(2);
  const test::TemporaryDirectory directory;
  const std::string path = directory / "step-2";
  test::on_devices(test::num_ranks(2), [&](const dist::Mesh& mesh) {
    Trainer trainer(mesh, FULL_SHARD);
    for (int i = 0; i < 2; ++i) trainer.step();
    TrainState state = trainer.state();
    const std::int64_t pinned = test::accelerator::pinned_nbytes();
    save(state, path, {.async = true});
    EXPECT_GT(test::accelerator::pinned_nbytes(), pinned);  // the state was copied to pinned memory
    for (int i = 0; i < 3; ++i) trainer.step();
    state.wait();
    Trainer other(mesh, FULL_SHARD);
    load(other.state(), path);
    expect_parameters(*other.model, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(Modes, StateOnDeviceTest, ::testing::ValuesIn(test::accelerator::modes()),
                         test::name_of_mode);

}  // namespace
}  // namespace tessera
