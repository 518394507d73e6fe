#include <gmock/gmock.h>

#include "accelerator/accelerator.h"
#include "runtime/support/checks.h"
#include "tessera/tessera.h"

namespace tessera {
namespace {

using test::Block;
using test::Transformer;

constexpr int kNumSteps = 4;

at::Tensor mean_square(const at::Tensor& logits) {
  return logits.to(torch::kFloat).square().mean();
}

/// Returns a batch per step. All ranks use the same, so that averaging does not change gradients.
std::vector<at::Tensor> batches_on(at::Device device) {
  std::vector<at::Tensor> batches;
  for (int step = 0; step < kNumSteps; ++step) {
    batches.push_back(
        (test::some_ids() + step).remainder(test::TransformerImpl::kVocabulary).to(device));
  }
  return batches;
}

/// What makes the host wait within a step.
enum class Waits {
  none,
  at_ends,    // at the end of forward and backward: ranks exchange which parameters they used
  offloaded,  // also for each gradient that goes to the host
};

/// Trains with AdamW and returns the losses, which it reads at the end.
template <class Forward>
std::vector<double> losses_of(Transformer& model, at::Device device, const Forward& run,
                              Waits waits = Waits::none) {
  torch::optim::AdamW optimizer(test::unique_parameters(*model), torch::optim::AdamWOptions(1e-2));
  const std::vector<at::Tensor> batches = batches_on(device);
  std::vector<at::Tensor> on_device;
  for (const at::Tensor& batch : batches) {
    optimizer.zero_grad();
    const at::Tensor loss = mean_square(run(batch));
    loss.backward();
    optimizer.step();
    on_device.push_back(loss.detach());
    if (on_device.size() == 1) test::accelerator::take_waiting_operators(device);
  }
  const auto waiting = test::accelerator::take_waiting_operators(device);
  if (test::accelerator::knows_waiting_operators() && waits != Waits::offloaded) {
    EXPECT_THAT(waiting, ::testing::Each("copy to the host"));
    EXPECT_LE(waiting.size(), waits == Waits::none ? 0 : 2 * (kNumSteps - 1));
  }
  std::vector<double> losses;
  for (const at::Tensor& loss : on_device) losses.push_back(loss.item<double>());
  return losses;
}

std::vector<double> sharded_losses(at::Device device, const FullyShardOptions& options) {
  Transformer model = test::seeded<Transformer>();
  model->to(device);
  fully_shard(*model, options);
  return losses_of(
      model, device, [&](const at::Tensor& ids) { return forward(model, ids); },
      options.offload == Offload::params ? Waits::offloaded
      : options.mesh.world_size() > 1    ? Waits::at_ends
                                         : Waits::none);
}

struct Variant {
  std::string name;
  ShardingStrategy strategy;
  int world_size;
  Offload offload = Offload::none;
  ForwardPrefetch forward_prefetch = ForwardPrefetch::none;
  BackwardPrefetch backward_prefetch = BackwardPrefetch::backward_pre;
  bool is_in_bfloat16 = false;
  bool limits_all_gathers = true;
  FreedParameters freed_parameters = FreedParameters::freed;
};

constexpr auto kNext = ForwardPrefetch::next;
constexpr auto kPre = BackwardPrefetch::backward_pre;

std::vector<Variant> variants() {
  const auto none = Offload::none;
  const auto params = Offload::params;
  const auto no = ForwardPrefetch::none;
  std::vector<Variant> all;
  for (int world_size = 1; world_size <= 4; ++world_size) {
    const std::string on = " on " + std::to_string(world_size);
    for (const auto strategy : {FULL_SHARD, SHARD_GRAD_OP, NO_SHARD}) {
      all.push_back({std::string(to_string(strategy)) + on, strategy, world_size});
    }
  }
  for (const auto strategy : {HYBRID_SHARD, HYBRID_SHARD_ZERO2}) {
    all.push_back({std::string(to_string(strategy)) + " on 2", strategy, 2});
    all.push_back({std::string(to_string(strategy)) + " on 4", strategy, 4});
    all.push_back(
        {std::string(to_string(strategy)) + " on 4, bf16", strategy, 4, none, kNext, kPre, true});
  }
  all.push_back({"offloaded on 1", FULL_SHARD, 1, params});
  all.push_back({"offloaded on 2", FULL_SHARD, 2, params, kNext});
  all.push_back({"offloaded on 2, SHARD_GRAD_OP", SHARD_GRAD_OP, 2, params});
  all.push_back({"offloaded on 4, HYBRID_SHARD, bf16", HYBRID_SHARD, 4, params, kNext, kPre, true});
  all.push_back({"prefetch on 2", FULL_SHARD, 2, none, kNext});
  all.push_back({"backward_post on 2", FULL_SHARD, 2, none, no, BackwardPrefetch::backward_post});
  all.push_back({"no prefetch on 2", FULL_SHARD, 2, none, no, BackwardPrefetch::none});
  all.push_back({"bf16 on 1", FULL_SHARD, 1, none, no, kPre, true});
  all.push_back({"bf16 on 2", FULL_SHARD, 2, none, kNext, kPre, true});
  all.push_back({"unlimited on 2", FULL_SHARD, 2, none, kNext, kPre, false, false});
  all.push_back({"unlimited, bf16 on 2", FULL_SHARD, 2, none, kNext, kPre, true, false});
  all.push_back(
      {"poisoned on 2", FULL_SHARD, 2, none, kNext, kPre, false, true, FreedParameters::poisoned});
  all.push_back({"poisoned, unlimited on 2", FULL_SHARD, 2, none, kNext, kPre, false, false,
                 FreedParameters::poisoned});
  return all;
}

void expect_equal_losses(const Variant& variant, const std::vector<double>& expected) {
  const bool is_hybrid = variant.strategy == HYBRID_SHARD || variant.strategy == HYBRID_SHARD_ZERO2;
  test::on_devices(
      variant.world_size,
      [&](const dist::Mesh& mesh) {
        FullyShardOptions options{.mesh = mesh,
                                  .policy = ModuleWrapPolicy<Block>(),
                                  .strategy = variant.strategy,
                                  .forward_prefetch = variant.forward_prefetch,
                                  .backward_prefetch = variant.backward_prefetch,
                                  .limit_all_gathers = variant.limits_all_gathers,
                                  .freed_parameters = variant.freed_parameters,
                                  .offload = variant.offload};
        if (variant.is_in_bfloat16) options.mixed_precision.param_dtype = torch::kBFloat16;
        const auto found = sharded_losses(test::accelerator::device(mesh.rank()), options);
        for (std::size_t step = 0; step < kNumSteps; ++step) {
          EXPECT_NEAR(found[step], expected[step], variant.is_in_bfloat16 ? 5e-2 : 1e-5) << step;
        }
      },
      is_hybrid ? test::two_replicas() : dist::MeshOptions{});
}

class TrainingTest : public test::AcceleratorTest {};

/// Shows A5.
TEST_P(TrainingTest, EqualsTheUnshardedRunOnTheCpu) {
  Transformer model = test::seeded<Transformer>();
  const std::vector<double> expected =
      losses_of(model, at::kCPU, [&](const at::Tensor& ids) { return model->forward(ids); });
  const std::vector<double> in_bfloat16 = sharded_losses(
      at::kCPU,
      {.policy = ModuleWrapPolicy<Block>(), .mixed_precision = {.param_dtype = torch::kBFloat16}});
  for (const Variant& variant : variants()) {
    SCOPED_TRACE(variant.name);
    test::accelerator::begin(GetParam());
    expect_equal_losses(variant, variant.is_in_bfloat16 ? in_bfloat16 : expected);
    if (::testing::Test::IsSkipped()) return;
    test::accelerator::end();
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, TrainingTest, ::testing::ValuesIn(test::accelerator::modes()),
                         test::name_of_mode);

}  // namespace
}  // namespace tessera
