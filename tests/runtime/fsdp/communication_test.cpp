#include <gtest/gtest.h>
#include <torch/torch.h>

#include "runtime/support/checks.h"

namespace tessera {
namespace dist {

void PrintTo(const Traffic& traffic, std::ostream* out) {
  *out << "all-gather " << traffic.all_gather << ", reduce-scatter " << traffic.reduce_scatter
       << ", all-reduce " << traffic.all_reduce << ", broadcast " << traffic.broadcast;
}

}  // namespace dist
namespace {

using test::Block;
using test::seeded;
using test::some_ids;
using test::Transformer;

/// Bytes of the padded flat parameters: of the root, and of the blocks together.
struct Sizes {
  std::uint64_t root = 0;
  std::uint64_t blocks = 0;
  /// Bytes of the messages at the end of a phase. In them ranks tell each other which collectives
  /// they needed, and which gradients they have.
  std::uint64_t forward_end = 3 * sizeof(int);
  std::uint64_t backward_end = 3 * sizeof(int);
};

Sizes sizes_of(const Transformer& model, int num_ranks) {
  Sizes sizes;
  for (const FlatParameterInfo& info : handles(*model)) {
    const auto nbytes = static_cast<std::uint64_t>(info.sharded_numel * num_ranks) * sizeof(float);
    (info.module_fqn.empty() ? sizes.root : sizes.blocks) += nbytes;
    sizes.forward_end += 2 * sizeof(int);
    sizes.backward_end += (2 + info.parameters.size()) * sizeof(int);
  }
  return sizes;
}

dist::Traffic operator-(const dist::Traffic& a, const dist::Traffic& b) {
  return {a.all_gather - b.all_gather, a.reduce_scatter - b.reduce_scatter,
          a.all_reduce - b.all_reduce, a.broadcast - b.broadcast};
}

class CommunicationTest : public ::testing::TestWithParam<std::tuple<ShardingStrategy, int>> {};

// The formulas of docs/fully_shard.md, with P the padded bytes of all flat parameters.
// Shows B10.
TEST_P(CommunicationTest, BytesPerStepFollowTheFormula) {
  const auto [strategy, num_ranks] = GetParam();
  test::on_ranks(num_ranks, [strategy = strategy, num_ranks = num_ranks](const dist::Mesh& mesh) {
    Transformer model = seeded<Transformer>();
    fully_shard(*model, {.mesh = mesh, .policy = ModuleWrapPolicy<Block>(), .strategy = strategy});
    const bool is_sharded = strategy != NO_SHARD;
    const Sizes sizes = sizes_of(model, is_sharded ? num_ranks : 1);
    const std::uint64_t all = sizes.root + sizes.blocks;
    dist::Traffic expected;
    if (strategy == FULL_SHARD) {
      // The root stays gathered between forward and backward.
      expected = {all + sizes.blocks, all, sizes.forward_end + sizes.backward_end};
    } else if (strategy == SHARD_GRAD_OP) {
      expected = {all, all, sizes.forward_end + sizes.backward_end};
    } else {
      expected = {0, 0, all + sizes.backward_end};
    }
    for (int step = 0; step < 3; ++step) {
      const dist::Traffic before = mesh.world()->traffic();
      forward(model, some_ids()).sum().backward();
      EXPECT_EQ(mesh.world()->traffic() - before, expected) << "step " << step;
    }
    const dist::Traffic before = mesh.world()->traffic();
    {
      const NoSyncScope no_sync(*model);
      forward(model, some_ids()).sum().backward();
    }
    const dist::Traffic found = mesh.world()->traffic() - before;
    EXPECT_EQ(found.reduce_scatter, 0U);
    EXPECT_EQ(found.all_gather, is_sharded ? all : 0U) << "the backward uses what is gathered";
    EXPECT_EQ(found.all_reduce, is_sharded ? 2 * sizes.forward_end : 0U);
  });
}

INSTANTIATE_TEST_SUITE_P(Strategies, CommunicationTest,
                         ::testing::Combine(::testing::Values(FULL_SHARD, SHARD_GRAD_OP, NO_SHARD),
                                            ::testing::Values(2, 3, 4)));

// Shows B10.
TEST(CommunicationBytesTest, HybridGathersWithinTheShardAxisAndAveragesShardsAcross) {
  dist::MeshOptions mesh_options;
  mesh_options.axes = {{"replicate", 2}, {"shard", 2}};
  for (const ShardingStrategy strategy : {HYBRID_SHARD, HYBRID_SHARD_ZERO2}) {
    test::on_ranks(
        4,
        [&](const dist::Mesh& mesh) {
          Transformer model = seeded<Transformer>();
          fully_shard(*model,
                      {.mesh = mesh, .policy = ModuleWrapPolicy<Block>(), .strategy = strategy});
          const Sizes sizes = sizes_of(model, 2);
          const std::uint64_t all = sizes.root + sizes.blocks;
          forward(model, some_ids()).sum().backward();
          const std::uint64_t gathered = strategy == HYBRID_SHARD ? all + sizes.blocks : all;
          EXPECT_EQ(mesh.axis("shard")->traffic(), (dist::Traffic{gathered, all, 0}));
          EXPECT_EQ(mesh.axis("replicate")->traffic(), (dist::Traffic{0, 0, all / 2}));
          EXPECT_EQ(mesh.world()->traffic(),
                    (dist::Traffic{0, 0, sizes.forward_end + sizes.backward_end}));
        },
        mesh_options);
  }
}

// Shows B13.
TEST(CommunicationBytesTest, NothingIsPaddedWhereNothingNeedsTo) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    const auto even = std::make_shared<torch::nn::LinearImpl>(4, 4);
    fully_shard(*even, {.mesh = mesh});
    EXPECT_EQ(handles(*even)[0].sharded_numel * 2, handles(*even)[0].unpadded_numel);
    const auto odd = std::make_shared<torch::nn::LinearImpl>(4, 3);
    fully_shard(*odd, {.mesh = mesh});
    EXPECT_EQ(handles(*odd)[0].unpadded_numel, 15);
    EXPECT_EQ(handles(*odd)[0].sharded_numel, 8);
  });
}

// Shows B11.
TEST(CommunicationBytesTest, LowPrecisionHalvesTheBytes) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    const auto traffic_of = [&](const MixedPrecision& precision) {
      const dist::Traffic before = mesh.world()->traffic();
      const auto model = std::make_shared<torch::nn::LinearImpl>(8, 8);  // needs no padding
      fully_shard(*model, {.mesh = mesh, .mixed_precision = precision});
      forward(model, torch::ones({2, 8})).sum().backward();
      return mesh.world()->traffic() - before;
    };
    const dist::Traffic full = traffic_of({});
    const dist::Traffic half = traffic_of({.param_dtype = torch::kBFloat16});
    const dist::Traffic mixed =
        traffic_of({.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat});
    EXPECT_EQ(half, (dist::Traffic{full.all_gather / 2, full.reduce_scatter / 2, full.all_reduce}));
    EXPECT_EQ(mixed, (dist::Traffic{full.all_gather / 2, full.reduce_scatter, full.all_reduce}));
  });
}

}  // namespace
}  // namespace tessera
