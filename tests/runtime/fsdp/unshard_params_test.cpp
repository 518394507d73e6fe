#include <gmock/gmock.h>
#include <torch/torch.h>

#include "runtime/support/checks.h"
#include "runtime/support/counting_allocator.h"

namespace tessera {
namespace {

using test::Block;
using test::error_of;
using test::seeded;
using test::some_ids;
using test::Transformer;
using ::testing::HasSubstr;

struct UnshardSetup {
  ShardingStrategy strategy;
  int world_size;
  Offload offload = Offload::none;
  friend void PrintTo(const UnshardSetup& setup, std::ostream* out) {
    *out << to_string(setup.strategy) << " on " << setup.world_size
         << (setup.offload == Offload::params ? ", offloaded" : "");
  }
};

class UnshardParamsTest : public ::testing::TestWithParam<UnshardSetup> {
 protected:
  /// Runs `body` on ranks with a model that is sharded by the test's parameter (UnshardSetup).
  static void on_sharded(
      const std::function<void(const dist::Mesh&, Transformer&, const Transformer&)>& body) {
    const auto setup = GetParam();
    dist::MeshOptions options;
    const bool is_hybrid = setup.strategy == HYBRID_SHARD;
    if (is_hybrid) options.axes = {{"replicate", 2}, {"shard", -1}};
    test::on_ranks(
        setup.world_size,
        [&](const dist::Mesh& mesh) {
          const Transformer unsharded = seeded<Transformer>();
          Transformer model = seeded<Transformer>();
          fully_shard(*model, {.mesh = mesh,
                               .policy = ModuleWrapPolicy<Block>(),
                               .strategy = setup.strategy,
                               .offload = setup.offload});
          body(mesh, model, unsharded);
        },
        options);
  }
};

/// Compares whole parameters with those of an unsharded model, times `factor`.
void expect_values_of(const Transformer& unsharded, Transformer& sharded, double factor = 1) {
  const auto scope = unshard_params(*sharded, {.writeback = false});
  const auto found = sharded->named_parameters();
  for (const auto& expected : unsharded->named_parameters()) {
    ASSERT_EQ(found[expected.key()].sizes(), expected.value().sizes()) << expected.key();
    EXPECT_TRUE(found[expected.key()].equal(expected.value() * factor)) << expected.key();
  }
}

void scale_all(const Transformer& model, double factor) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : test::unique_parameters(*model)) parameter.mul_(factor);
}

// Shows C4.
TEST_P(UnshardParamsTest, ParametersAreWholeInTheScopeAndPartsAfterIt) {
  on_sharded([](const dist::Mesh&, Transformer& model, const Transformer& unsharded) {
    const at::Tensor weight = model->blocks[0]->as<Block>()->up->weight;
    const auto before = weight.sizes().vec();
    {
      const auto scope = unshard_params(*model);
      EXPECT_EQ(weight.sizes(), (std::vector<std::int64_t>{30, 10}));
      const at::NoGradGuard no_grad;
      const at::Tensor expected = Transformer(unsharded)->forward(some_ids());
      EXPECT_TRUE(model->forward(some_ids()).equal(expected));
    }
    EXPECT_EQ(weight.sizes().vec(), before);
    expect_values_of(unsharded, model);
    forward(model, some_ids()).sum().backward();  // and a pass works after it
  });
}

// Shows C4.
TEST_P(UnshardParamsTest, EveryRankKeepsItsPartOfWhatItWrites) {
  on_sharded([](const dist::Mesh&, Transformer& model, const Transformer& unsharded) {
    {
      const auto scope = unshard_params(*model);
      scale_all(model, 2);
    }
    expect_values_of(unsharded, model, 2);
  });
}

// Shows C4.
TEST_P(UnshardParamsTest, WithoutWritebackWritesAreDropped) {
  on_sharded([](const dist::Mesh&, Transformer& model, const Transformer& unsharded) {
    {
      const auto scope = unshard_params(*model, {.writeback = false});
      scale_all(model, 2);
    }
    expect_values_of(unsharded, model);
  });
}

// Shows C5.
TEST_P(UnshardParamsTest, AllRanksKeepTheirPartsOfWhatRankZeroWrites) {
  for (const bool offload_to_cpu : {false, true}) {
    on_sharded([&](const dist::Mesh& mesh, Transformer& model, const Transformer& unsharded) {
      const at::Tensor weight = model->norm->weight;
      const auto sharded = weight.sizes().vec();
      {
        const auto scope =
            unshard_params(*model, {.rank0_only = true, .offload_to_cpu = offload_to_cpu});
        if (mesh.rank() == 0) {
          EXPECT_EQ(weight.numel(), 10);
          scale_all(model, 2);
        } else {
          EXPECT_EQ(weight.sizes().vec(), sharded);
          scale_all(model, 77);  // scales this rank's shards: dropped
        }
      }
      expect_values_of(unsharded, model, 2);
    });
  }
}

// Shows C5.
TEST_P(UnshardParamsTest, AlsoAfterAnExceptionInTheScope) {
  on_sharded([](const dist::Mesh& mesh, Transformer& model, const Transformer& unsharded) {
    const std::string error = error_of([&] {
      const auto scope = unshard_params(*model, {.rank0_only = true});
      if (mesh.rank() == 0) scale_all(model, 2);
      throw std::runtime_error("the user's own");
    });
    EXPECT_EQ(error, "the user's own");
    expect_values_of(unsharded, model, 2);
  });
}

// Other views of a unit's memory are new data too: here two parameters exchange theirs.
// Shows C4.
TEST_P(UnshardParamsTest, DataFromAnotherParameterIsWrittenBack) {
  for (const bool rank0_only : {false, true}) {
    on_sharded([&](const dist::Mesh& mesh, Transformer& model, const Transformer& unsharded) {
      const auto block = model->blocks[1]->as<Block>();
      const auto expected = Transformer(unsharded)->blocks[1]->as<Block>();
      at::Tensor norm = block->norm->weight;
      at::Tensor down = block->down->bias;
      norm.requires_grad_(false);  // set_data of a leaf that requires a gradient is an error in
      down.requires_grad_(false);  // some releases
      {
        const auto scope = unshard_params(*model, {.rank0_only = rank0_only});
        if (mesh.rank() == 0 || !rank0_only) {
          const at::Tensor of_norm = norm.detach();
          norm.set_data(down.detach());
          down.set_data(of_norm);
        }
      }
      const auto scope = unshard_params(*model, {.writeback = false});
      EXPECT_TRUE(norm.equal(expected->down->bias));
      EXPECT_TRUE(down.equal(expected->norm->weight));
    });
  }
}

// Shows C4.
TEST_P(UnshardParamsTest, ClearedAndNewGradientsAreWrittenBack) {
  for (const bool rank0_only : {false, true}) {
    on_sharded([&](const dist::Mesh& mesh, Transformer& model, const Transformer& /*unsharded*/) {
      const auto first = model->blocks[0]->as<Block>();
      const auto norm = model->norm;
      forward(model, some_ids()).sum().backward();
      first->up->weight.mutable_grad() = at::Tensor();
      const UnshardParamsOptions options = {.rank0_only = rank0_only, .with_grads = true};
      const at::Tensor given = torch::arange(300, at::kFloat).reshape({30, 10});
      {
        const auto scope = unshard_params(*model, options);
        if (mesh.rank() == 0 || !rank0_only) {
          EXPECT_TRUE(norm->weight.grad().defined());
          EXPECT_FALSE(first->up->weight.grad().defined());
          norm->weight.mutable_grad() = at::Tensor();
          first->up->weight.mutable_grad() = given.clone();
        }
      }
      EXPECT_FALSE(norm->weight.grad().defined());
      EXPECT_TRUE(norm->bias.grad().defined());
      const at::Tensor shard = first->up->weight.grad();
      ASSERT_TRUE(shard.defined());
      EXPECT_EQ(shard.sizes(), first->up->weight.sizes());
      {
        const auto scope = unshard_params(*model, {.writeback = false, .with_grads = true});
        EXPECT_TRUE(first->up->weight.grad().equal(given));
        EXPECT_FALSE(norm->weight.grad().defined());
      }
      torch::optim::SGD(parameters(*model), 0.1).zero_grad(/*set_to_none=*/false);
      forward(model, some_ids()).sum().backward();
      EXPECT_TRUE(norm->weight.grad().defined());
    });
  }
}

// Shows C4.
TEST_P(UnshardParamsTest, ClippingGradientsInTheScopeIsRefused) {
  on_sharded([](const dist::Mesh&, Transformer& model, const Transformer&) {
    forward(model, some_ids()).sum().backward();
    for (const bool with_grads : {false, true}) {
      const auto scope = unshard_params(*model, {.with_grads = with_grads});
      EXPECT_THAT(error_of([&] { clip_grad_norm_(*model, 1); }),
                  HasSubstr("embedding.weight: clip_grad_norm_: expected a call outside of "
                            "unshard_params, found a call within it"));
    }
    EXPECT_GT(clip_grad_norm_(*model, 1), 0);
  });
}

// Shows C4.
TEST_P(UnshardParamsTest, GradientsAreWholeAndWrittenBack) {
  for (const bool rank0_only : {false, true}) {
    on_sharded([&](const dist::Mesh& mesh, Transformer& model, const Transformer& unsharded) {
      Transformer(unsharded)->forward(some_ids()).sum().backward();
      forward(model, some_ids()).sum().backward();
      const UnshardParamsOptions options = {.rank0_only = rank0_only, .with_grads = true};
      {
        const auto scope = unshard_params(*model, options);
        if (mesh.rank() == 0 || !rank0_only) {
          const auto found = model->named_parameters();
          for (const auto& expected : unsharded->named_parameters()) {
            EXPECT_TRUE(
                torch::allclose(found[expected.key()].grad(), expected.value().grad(), 1e-5, 1e-6))
                << expected.key();
          }
          for (const at::Tensor& parameter : test::unique_parameters(*model)) {
            parameter.grad().mul_(2);
          }
        }
      }
      test::expect_gradients_of(*unsharded, *model, mesh, 2);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Setups, UnshardParamsTest,
                         ::testing::Values(UnshardSetup{FULL_SHARD, 1}, UnshardSetup{FULL_SHARD, 2},
                                           UnshardSetup{FULL_SHARD, 3},
                                           UnshardSetup{SHARD_GRAD_OP, 2},
                                           UnshardSetup{NO_SHARD, 2}, UnshardSetup{HYBRID_SHARD, 4},
                                           UnshardSetup{FULL_SHARD, 2, Offload::params}));

// Shows C4.
TEST(UnshardParamsScopeTest, OfASubtreeOrOfOneUnitAlone) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = test::sharded_transformer(mesh);
    const auto sizes = [&](int block) {
      return model->blocks[static_cast<std::size_t>(block)]->as<Block>()->up->weight.dim();
    };
    {
      const auto scope = unshard_params(*model->blocks[1]);
      EXPECT_EQ(sizes(0), 1);
      EXPECT_EQ(sizes(1), 2);
      EXPECT_EQ(model->embedding->weight.dim(), 1);
    }
    {
      const auto scope = unshard_params(*model, {.recurse = false});
      EXPECT_EQ(sizes(1), 1);
      EXPECT_EQ(model->embedding->weight.dim(), 2);
    }
    {
      // A module inside a unit: its whole unit is unsharded.
      const auto scope = unshard_params(*model->blocks[2]->as<Block>()->up);
      EXPECT_EQ(sizes(2), 2);
    }
    EXPECT_THAT(
        error_of([&] {
          static_cast<void>(unshard_params(*model->blocks[2]->as<Block>()->up, {.recurse = false}));
        }),
        HasSubstr("expected a fully sharded module, or the option recurse"));
  });
}

// Shows C4.
TEST(UnshardParamsScopeTest, NestsWithTheSameOptions) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = test::sharded_transformer(mesh);
    const auto scope = unshard_params(*model);
    {
      const auto inner = unshard_params(*model->blocks[1]);
      EXPECT_EQ(model->embedding->weight.dim(), 2);
    }
    EXPECT_EQ(model->blocks[1]->as<Block>()->up->weight.dim(), 2);
    EXPECT_THAT(error_of([&] { static_cast<void>(unshard_params(*model, {.writeback = false})); }),
                HasSubstr("a nested unshard_params with the options of the outer one"));
    EXPECT_EQ(model->blocks[1]->as<Block>()->up->weight.dim(), 2);
  });
}

// Shows C4.
TEST(UnshardParamsScopeTest, IsRefusedWithinAPassAndPassesWithinIt) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = test::sharded_transformer(mesh);
    const at::Tensor loss = forward(model, some_ids()).sum();
    EXPECT_THAT(error_of([&] { static_cast<void>(unshard_params(*model)); }),
                HasSubstr("unshard_params outside of forward and backward"));
    loss.backward();
    {
      const auto scope = unshard_params(*model);
      EXPECT_THAT(error_of([&] { forward(model, some_ids()); }),
                  HasSubstr("a tessera::forward outside of unshard_params"));
    }
    forward(model, some_ids()).sum().backward();
  });
}

// Shows C4.
TEST(UnshardParamsScopeTest, TakesOtherDataOfTheSameShapeAndNamesWhatDoesNotFit) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = test::sharded_transformer(mesh);
    at::Tensor weight = model->norm->weight;
    {
      const auto scope = unshard_params(*model, {.rank0_only = true});
      if (mesh.rank() == 0) weight.set_data(torch::arange(10, at::kFloat));
    }
    {
      const auto scope = unshard_params(*model, {.writeback = false});
      EXPECT_TRUE(weight.equal(torch::arange(10, at::kFloat)));
    }
    const std::string error = error_of([&] {
      const auto scope = unshard_params(*model, {.rank0_only = true});
      if (mesh.rank() == 0) weight.set_data(torch::zeros({3}));
    });
    EXPECT_THAT(error, mesh.rank() == 0 ? HasSubstr("norm.weight") : HasSubstr("none"));
    const auto scope = unshard_params(*model, {.writeback = false});
    EXPECT_TRUE(weight.equal(torch::arange(10, at::kFloat)));  // as it was
  });
}

// Shows C5.
TEST(UnshardParamsScopeTest, WritingBackFromRankZeroTakesNoMoreMemoryThanNot) {
  test::allocated_memory();  // counts from here on
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = test::sharded_transformer(mesh);
    // Gloo's thread frees a tensor some time after its collective, so take the least of several
    // rounds.
    const auto peak_of = [&](bool writeback) {
      std::int64_t least = std::numeric_limits<std::int64_t>::max();
      for (int round = 0; round < 20; ++round) {
        std::optional<UnshardedParams> scope(
            std::in_place, *model,
            UnshardParamsOptions{.writeback = writeback, .rank0_only = true});
        test::reset_peak();  // measures only leaving the scope: the gather is the same for both
        scope.reset();
        least = std::min(least, test::allocated_memory().peak);
      }
      return least;
    };
    EXPECT_LE(peak_of(true), peak_of(false));
  });
}

// Shows C4.
TEST(UnshardParamsScopeTest, ATransposedParameterIsWrittenBackOrRefused) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    torch::nn::Linear model{nullptr};
    test::with_generator([&] {
      torch::manual_seed(3);
      model = torch::nn::Linear(5, 5);
    });
    const at::Tensor before = model->weight.detach().clone();
    fully_shard(*model, {.mesh = mesh});
    {
      const auto scope = unshard_params(*model);
      model->weight.set_data(model->weight.detach().t());
    }
    const std::string error = error_of([&] {
      const auto scope = unshard_params(*model);
      model->bias.set_data(model->bias.detach().view({5, 1}));
    });
    EXPECT_THAT(error, HasSubstr("bias"));
    EXPECT_THAT(error, HasSubstr("data of another shape"));
    const auto scope = unshard_params(*model, {.writeback = false});
    EXPECT_TRUE(model->weight.equal(before.t()));
  });
}

// With one shard, views of parameters stay valid, so writes through them must not be lost.
// Shows C4.
TEST(UnshardParamsScopeTest, WritesThroughAViewFromBeforeTheScopeAreKeptIfOneRankHoldsAll) {
  for (const int world_size : {1, 2}) {
    test::on_ranks(world_size, [](const dist::Mesh& mesh) {
      test::Mlp model = test::sharded_mlp(mesh, NO_SHARD);
      const at::Tensor older = model->up->bias.detach();
      {
        const auto scope = unshard_params(*model);
        older.fill_(5);
        EXPECT_TRUE(model->up->bias.eq(5).all().item<bool>());
      }
      EXPECT_TRUE(model->up->bias.eq(5).all().item<bool>());
      {
        const auto scope = unshard_params(*model, {.writeback = false});
        const at::NoGradGuard no_grad;
        model->up->bias.fill_(7);
      }
      EXPECT_TRUE(model->up->bias.eq(5).all().item<bool>());
    });
  }
}

}  // namespace
}  // namespace tessera
