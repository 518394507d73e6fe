// Accumulation, replicate, clipping and memory.
#include <gmock/gmock.h>

#include "accelerator/accelerator.h"
#include "runtime/support/checks.h"
#include "tessera/tessera.h"

namespace tessera {
namespace {

using test::Block;
using test::Transformer;
using test::accelerator::device;

class GradientsOnDeviceTest : public test::AcceleratorTest {};

at::Tensor batch_on(at::Device its_device, int number) {
  return (test::some_ids() + number).remainder(test::TransformerImpl::kVocabulary).to(its_device);
}

at::Tensor loss_of(const at::Tensor& logits) {
  return logits.to(torch::kFloat).square().mean();
}

/// Returns the gradients of the sum of the losses of `num_batches` batches, computed on the CPU.
std::map<std::string, at::Tensor> expected_gradients(int num_batches) {
  Transformer model = test::seeded<Transformer>();
  for (int i = 0; i < num_batches; ++i) loss_of(model->forward(batch_on(at::kCPU, i))).backward();
  std::map<std::string, at::Tensor> gradients;
  for (const auto& each : model->named_parameters()) gradients[each.key()] = each.value().grad();
  return gradients;
}

template <class Model>
void expect_whole_gradients(Model& model, const std::map<std::string, at::Tensor>& expected,
                            double factor = 1) {
  const UnshardedParams whole(*model, {.writeback = false, .with_grads = true});
  for (const auto& each : model->named_parameters()) {
    ASSERT_TRUE(each.value().grad().defined()) << each.key();
    EXPECT_TRUE(
        torch::allclose(each.value().grad().cpu(), expected.at(each.key()) * factor, 1e-4, 1e-6))
        << each.key();
  }
}

TEST_P(GradientsOnDeviceTest, AccumulateWithoutReducing) {
  const auto expected = expected_gradients(3);
  for (const auto strategy : {FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD}) {
    SCOPED_TRACE(to_string(strategy));
    const auto options = strategy == HYBRID_SHARD ? test::two_replicas() : dist::MeshOptions{};
    if (strategy == HYBRID_SHARD && test::num_ranks(4) < 4) continue;
    test::on_devices(
        strategy == HYBRID_SHARD ? 4 : test::num_ranks(2),
        [&](const dist::Mesh& mesh) {
          const at::Device own = device(mesh.rank());
          Transformer model = test::seeded<Transformer>();
          model->to(own);
          fully_shard(*model,
                      {.mesh = mesh, .policy = ModuleWrapPolicy<Block>(), .strategy = strategy});
          {
            const NoSyncScope no_sync(*model);
            for (int i = 0; i < 2; ++i) loss_of(forward(model, batch_on(own, i))).backward();
          }
          loss_of(forward(model, batch_on(own, 2))).backward();
          expect_whole_gradients(model, expected);
        },
        options);
    test::accelerator::end();
  }
}

TEST_P(GradientsOnDeviceTest, ReplicateAveragesThem) {
  const int world_size = test::num_ranks(2);
  const auto expected = expected_gradients(world_size);
  test::on_devices(world_size, [&](const dist::Mesh& mesh) {
    const at::Device own = device(mesh.rank());
    Transformer model = test::seeded<Transformer>();
    model->to(own);
    replicate(*model, {.mesh = mesh, .bucket_nbytes = 2048});
    for (int step = 0; step < 3; ++step) {
      model->zero_grad();
      const at::Tensor batch = batch_on(own, mesh.rank());
      test::accelerator::take_waiting_operators(own);
      loss_of(forward(model, batch)).backward();
      if (test::accelerator::knows_waiting_operators()) {
        EXPECT_THAT(test::accelerator::take_waiting_operators(own), ::testing::IsEmpty());
      }
    }
    for (const auto& each : model->named_parameters()) {
      EXPECT_TRUE(torch::allclose(each.value().grad().cpu(), expected.at(each.key()) / world_size,
                                  1e-4, 1e-6))
          << each.key();
    }
  });
}

TEST_P(GradientsOnDeviceTest, AreClipped) {
  Transformer on_cpu = test::seeded<Transformer>();
  loss_of(on_cpu->forward(batch_on(at::kCPU, 0))).backward();
  const double norm =
      torch::nn::utils::clip_grad_norm_(test::unique_parameters(*on_cpu), /*max_norm=*/1e-3);
  std::map<std::string, at::Tensor> clipped;
  for (const auto& each : on_cpu->named_parameters()) clipped[each.key()] = each.value().grad();
  for (const Offload offload : {Offload::none, Offload::params}) {
    test::on_devices(test::num_ranks(2), [&](const dist::Mesh& mesh) {
      Transformer model = test::seeded<Transformer>();
      model->to(device(mesh.rank()));
      fully_shard(*model, {.mesh = mesh, .policy = ModuleWrapPolicy<Block>(), .offload = offload});
      loss_of(forward(model, batch_on(device(mesh.rank()), 0))).backward();
      EXPECT_NEAR(clip_grad_norm_(*model, 1e-3), norm, 1e-5 * norm);
      expect_whole_gradients(model, clipped);
    });
  }
}

struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    always = register_module("always", torch::nn::Linear(32, 32));
    sometimes = register_module("sometimes", torch::nn::Linear(32, 32));
  }
  at::Tensor forward(const at::Tensor& x, bool uses_both) {
    const at::Tensor y = always->forward(always->forward(x));  // gathered twice in a pass
    return uses_both ? sometimes->forward(y) : y;
  }
  torch::nn::Linear always{nullptr}, sometimes{nullptr};
};
TORCH_MODULE(Branches);

TEST_P(GradientsOnDeviceTest, OfAUnitThatOneRankUsesAreAveragedOverAll) {
  const auto input_of = [](int rank) {
    return torch::linspace(-1, 1 + rank, 4 * 32).reshape({4, 32});
  };
  Branches on_cpu = test::seeded<Branches>();
  on_cpu->forward(input_of(0), true).square().sum().backward();
  on_cpu->forward(input_of(1), false).square().sum().backward();
  std::map<std::string, at::Tensor> expected;
  for (const auto& each : on_cpu->named_parameters()) expected[each.key()] = each.value().grad();
  for (const bool is_in_bfloat16 : {false, true}) {
    test::on_devices(2, [&](const dist::Mesh& mesh) {
      const at::Device own = device(mesh.rank());
      Branches model = test::seeded<Branches>();
      model->to(own);
      FullyShardOptions options{.mesh = mesh, .policy = ModuleWrapPolicy<torch::nn::LinearImpl>()};
      if (is_in_bfloat16) options.mixed_precision.param_dtype = torch::kBFloat16;
      if (is_in_bfloat16) options.freed_parameters = FreedParameters::poisoned;
      fully_shard(*model, options);
      const at::Tensor x = input_of(mesh.rank()).to(own);
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        const bool uses_both = mesh.rank() == 0 || step == 0;
        forward(model, x, uses_both).to(torch::kFloat).square().sum().backward();
      }
      if (!is_in_bfloat16) expect_whole_gradients(model, expected, 0.5);
    });
    test::accelerator::end();
  }
}

TEST_P(GradientsOnDeviceTest, OffloadedParametersArePinned) {
  test::on_devices(test::num_ranks(2), [&](const dist::Mesh& mesh) {
    Transformer model = test::seeded<Transformer>();
    model->to(device(mesh.rank()));
    fully_shard(*model, {.mesh = mesh, .offload = Offload::params});
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : model->parameters()) {
      EXPECT_TRUE(parameter.is_cpu());
      EXPECT_TRUE(parameter.numel() == 0 || parameter.is_pinned());
    }
  });
}

/// Returns by how many bytes the memory of rank 0 grows at most during a forward.
std::int64_t peak_nbytes(bool limits_all_gathers) {
  std::int64_t peak = 0;
  test::on_devices(2, [&](const dist::Mesh& mesh) {
    const at::Device own = device(mesh.rank());
    Transformer model{nullptr};
    test::with_generator([&] { model = Transformer(/*num_blocks=*/12, /*width=*/32); });
    model->to(own);
    fully_shard(*model, {.mesh = mesh,
                         .policy = ModuleWrapPolicy<Block>(),
                         .forward_prefetch = ForwardPrefetch::next,
                         .limit_all_gathers = limits_all_gathers});
    const at::Tensor ids = batch_on(own, 0);
    const at::NoGradGuard no_grad;
    forward(model, ids);
    test::accelerator::synchronize(own);
    const std::int64_t before = test::accelerator::allocated_nbytes(own);
    test::accelerator::reset_peak(own);
    forward(model, ids);
    if (mesh.rank() == 0) peak = test::accelerator::peak_nbytes(own) - before;
  });
  return peak;
}

TEST_P(GradientsOnDeviceTest, TheRateLimiterBoundsGatheredMemory) {
  const std::int64_t of_block = 32 * 32 * 6 * static_cast<std::int64_t>(sizeof(float));
  EXPECT_LT(peak_nbytes(true), 5 * of_block);
}

INSTANTIATE_TEST_SUITE_P(Modes, GradientsOnDeviceTest,
                         ::testing::ValuesIn(test::accelerator::modes()), test::name_of_mode);

}  // namespace
}  // namespace tessera
