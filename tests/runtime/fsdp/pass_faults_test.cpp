#include <gmock/gmock.h>
#include <torch/torch.h>

#include "runtime/support/checks.h"

// Unusual programs: each must give right results or be refused.

namespace tessera {
namespace {

using test::error_of;
using test::expect_gradients_of;
using test::expect_same;
using test::gradients;
using test::mlp_input;
using test::seeded;
using test::sharded_mlp;
using ::testing::HasSubstr;

struct PairImpl : torch::nn::Module {
  PairImpl() {
    left = register_module("left", torch::nn::Linear(5, 5));
    right = register_module("right", torch::nn::Linear(5, 5));
    last = register_module("last", torch::nn::Linear(5, 2));
  }
  /// Operators that use both units at once.
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor both = torch::cat({left->weight, right->weight}, 0);
    const at::Tensor difference = left->weight - right->weight;
    return last->forward(torch::tanh(x.mm(both.t()).narrow(1, 0, 5) + x.mm(difference)));
  }
  torch::nn::Linear left{nullptr}, right{nullptr}, last{nullptr};
};
TORCH_MODULE(Pair);

at::Tensor some_rows() {
  return torch::linspace(-1, 1, 10).reshape({2, 5});
}

class PassFaultsTest : public ::testing::TestWithParam<ShardingStrategy> {};

// Shows B1.
TEST_P(PassFaultsTest, OneOperatorOverParametersOfSeveralUnits) {
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    Pair unsharded = seeded<Pair>();
    Pair model = seeded<Pair>();
    fully_shard(
        *model,
        {.mesh = mesh, .policy = ModuleWrapPolicy<torch::nn::Linear>(), .strategy = GetParam()});
    for (int step = 0; step < 2; ++step) {
      const at::Tensor expected = unsharded->forward(some_rows()).pow(2).sum();
      const at::Tensor found = forward(model, some_rows()).pow(2).sum();
      EXPECT_TRUE(torch::allclose(found, expected));
      expected.backward();
      found.backward();
    }
    expect_gradients_of(*unsharded, *model, mesh);
  });
}

// Shows B21.
TEST_P(PassFaultsTest, GradientsMayBeZeroedBetweenForwardAndBackward) {
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    test::Mlp model = sharded_mlp(mesh, GetParam());
    forward(model, mlp_input()).sum().backward();
    const std::vector<at::Tensor> once = gradients(*model);
    for (const bool set_to_none : {true, false}) {
      const at::Tensor loss = forward(model, mlp_input()).sum();
      model->zero_grad(set_to_none);
      loss.backward();
      expect_same(gradients(*model), once);
    }
  });
}

// Shows B21.
TEST_P(PassFaultsTest, AForwardWhoseResultIsDroppedLeavesNothingOpen) {
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    test::Mlp model = sharded_mlp(mesh, GetParam());
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    forward(model, mlp_input()).sum().backward();
    const std::vector<at::Tensor> once = gradients(*model);
    static_cast<void>(forward(model, mlp_input()));  // a validation step without NoGradGuard
    EXPECT_FALSE(is_in_pass(*model));
    expect_same(gradients(*model), once);
    const at::Tensor before = model->down->weight.detach().clone();
    optimizer.step();
    EXPECT_TRUE(before.numel() == 0 || !model->down->weight.detach().equal(before));
  });
}

// Shows B22.
TEST_P(PassFaultsTest, AStepBetweenForwardAndBackwardIsNotSilent) {
  if (GetParam() == NO_SHARD) return;  // parameters and gradients are whole, so the step is legal
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    test::Mlp model = sharded_mlp(mesh, GetParam());
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    forward(model, mlp_input()).sum().backward();
    const at::Tensor kept = forward(model, mlp_input());
    EXPECT_NE(error_of([&] { optimizer.step(); }), "none");
  });
}

// Shows B22.
TEST_P(PassFaultsTest, ABackwardThatFailedLeavesNothingBehind) {
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    test::Mlp model = sharded_mlp(mesh, GetParam());
    forward(model, mlp_input()).sum().backward();
    const std::vector<at::Tensor> once = gradients(*model);
    model->zero_grad();
    bool fails = true;
    at::Tensor input = mlp_input().requires_grad_();
    input.register_hook([&](const at::Tensor&) {
      if (fails) throw std::runtime_error("the user's own");
    });
    const at::Tensor loss = forward(model, input).sum();
    EXPECT_THAT(error_of([&] { loss.backward({}, /*retain_graph=*/true); }),
                HasSubstr("the user's own"));
    fails = false;
    loss.backward();
    expect_same(gradients(*model), once);
  });
}

INSTANTIATE_TEST_SUITE_P(Strategies, PassFaultsTest,
                         ::testing::Values(FULL_SHARD, SHARD_GRAD_OP, NO_SHARD),
                         [](const auto& test) { return std::string(to_string(test.param)); });

// Shows B21.
TEST(PassFaultsAloneTest, NoSyncScopesNest) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    test::Mlp model = sharded_mlp(mesh, FULL_SHARD);
    const std::uint64_t before = mesh.world()->traffic().reduce_scatter;
    const NoSyncScope outer(*model);
    { const NoSyncScope inner(*model); }
    forward(model, mlp_input()).sum().backward();
    EXPECT_EQ(mesh.world()->traffic().reduce_scatter, before);
  });
}

/// Uses a unit, or skips it.
struct MaybeImpl : torch::nn::Module {
  MaybeImpl() {
    first = register_module("first", torch::nn::Linear(5, 5));
    second = register_module("second", torch::nn::Linear(5, 5));
  }
  at::Tensor forward(const at::Tensor& x, bool uses_first) {
    return second->forward(uses_first ? first->forward(x) : x);
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
};
TORCH_MODULE(Maybe);

Maybe sharded_maybe(const dist::Mesh& mesh) {
  Maybe model = seeded<Maybe>();
  fully_shard(*model, {.mesh = mesh, .policy = ModuleWrapPolicy<torch::nn::Linear>()});
  return model;
}

// Shows B21.
TEST(PassFaultsAloneTest, WhatWasKeptUnderNoSyncIsReducedThoughThePassDoesNotUseIt) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Maybe unsharded = seeded<Maybe>();
    Maybe model = sharded_maybe(mesh);
    {
      const NoSyncScope no_sync(*model);
      forward(model, some_rows(), true).sum().backward();
    }
    forward(model, some_rows(), false).sum().backward();
    unsharded->forward(some_rows(), true).sum().backward();
    unsharded->forward(some_rows(), false).sum().backward();
    expect_gradients_of(*unsharded, *model, mesh);
  });
}

// Shows B21.
TEST(PassFaultsAloneTest, WhatWasKeptUnderNoSyncCanBeDropped) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Maybe unsharded = seeded<Maybe>();
    Maybe model = sharded_maybe(mesh);
    {
      const NoSyncScope no_sync(*model);
      forward(model, some_rows(), true).sum().backward();
    }
    {
      const ForwardScope scope(*model);
      EXPECT_THAT(test::error_of([&] { drop_unsynced_gradients(*model); }),
                  ::testing::HasSubstr("expected a call outside of forward and backward"));
    }
    const at::Tensor given_up = forward(model, some_rows(), true).sum();  // its pass stays open
    drop_unsynced_gradients(*model);
    forward(model, some_rows(), false).sum().backward();
    unsharded->forward(some_rows(), false).sum().backward();
    expect_gradients_of(*unsharded, *model, mesh);
    EXPECT_FALSE(model->first->weight.grad().defined());
    EXPECT_TRUE(given_up.defined());
  });
}

/// One unit; ranks use different parameters. A rank that does not use a parameter counts as zero in
/// the average. Shows B10.
TEST(PassFaultsAloneTest, AParameterThatOneRankAloneUsesIsTrainedOnAll) {
  for (const ShardingStrategy strategy : {FULL_SHARD, SHARD_GRAD_OP, NO_SHARD}) {
    test::on_ranks(3, [&](const dist::Mesh& mesh) {
      Maybe unsharded = seeded<Maybe>();
      Maybe model = seeded<Maybe>();
      fully_shard(*model, {.mesh = mesh, .strategy = strategy});
      forward(model, some_rows(), mesh.rank() == 1).sum().backward();
      for (int rank = 0; rank < 3; ++rank) {
        (unsharded->forward(some_rows(), rank == 1).sum() / 3).backward();
      }
      expect_gradients_of(*unsharded, *model, mesh);
      EXPECT_TRUE(model->first->weight.grad().defined());
    });
  }
}

// Shows B22.
TEST(PassFaultsAloneTest, ARankWhoseForwardEndsEarlyKeepsStep) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    test::Mlp unsharded = seeded<test::Mlp>();
    test::Mlp model = sharded_mlp(mesh, FULL_SHARD);
    const at::NoGradGuard no_grad;
    forward(model, mlp_input());
    {
      // Rank 1 ends its forward after the first layer.
      const ForwardScope scope(*model);
      const at::Tensor hidden = model->up->forward(mlp_input());
      if (mesh.rank() == 0) model->down->forward(model->middle->forward(hidden));
    }
    EXPECT_TRUE(torch::allclose(forward(model, mlp_input()), unsharded->forward(mlp_input())));
  });
}

// Shows B22.
TEST(PassFaultsAloneTest, ARankThatEndsAnotherPhaseIsTold) {
  dist::MeshOptions options;
  options.timeout = std::chrono::milliseconds(1500);
  test::on_ranks(
      2,
      [](const dist::Mesh& mesh) {
        test::Mlp model = sharded_mlp(mesh, FULL_SHARD);
        const std::string error = error_of([&] {
          // Rank 1 begins a backward while rank 0 begins a second forward.
          const at::Tensor loss = forward(model, mlp_input()).sum();
          if (mesh.rank() == 0) {
            forward(model, mlp_input());
          } else {
            loss.backward();
          }
        });
        EXPECT_THAT(error, HasSubstr("order of collectives"));
        EXPECT_THAT(error, HasSubstr("in the forward on rank 0"));
        EXPECT_THAT(error, HasSubstr("in the backward on rank 1"));
      },
      options);
}

// Shows B12.
TEST(PassFaultsAloneTest, TheGreatestOfGradientsThatAreNoNumbersIsNone) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    test::Mlp model = sharded_mlp(mesh, FULL_SHARD);
    (forward(model, mlp_input()).sum() * std::numeric_limits<double>::quiet_NaN()).backward();
    EXPECT_TRUE(std::isnan(clip_grad_norm_(*model, 1, std::numeric_limits<double>::infinity())));
  });
}

// As torch.nn.utils.clip_grad_norm_: an infinite norm makes finite gradients zero, NaN makes all
// NaN. Shows B12.
TEST(PassFaultsAloneTest, ClippingByANormThatIsNoNumberLeavesNoGradientUnclipped) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    for (const double bad :
         {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
      test::Mlp model = sharded_mlp(mesh, FULL_SHARD);
      forward(model, mlp_input()).sum().backward();
      if (mesh.rank() == 0) {
        const at::NoGradGuard no_grad;
        model->up->weight.mutable_grad().select(0, 0).fill_(bad);
      }
      const double norm = clip_grad_norm_(*model, 1);
      EXPECT_EQ(std::isnan(norm), std::isnan(bad));
      const at::NoGradGuard no_grad;
      const at::Tensor gradient = model->down->weight.grad();
      ASSERT_GT(gradient.numel(), 0);
      EXPECT_TRUE((std::isnan(bad) ? gradient.isnan() : gradient.eq(0)).all().item<bool>());
    }
  });
}

// A part of a model would reduce its gradients without the rest.
// Shows B21.
TEST(PassFaultsAloneTest, NoSyncScopeOfAPartOfTheModelIsRefused) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    test::Mlp unsharded = seeded<test::Mlp>();
    test::Mlp model = sharded_mlp(mesh, FULL_SHARD);
    const at::Tensor loss = forward(model, mlp_input()).sum();
    EXPECT_THAT(error_of([&] { const NoSyncScope no_sync(*model->up); }),
                HasSubstr("expected one root, found a second root (was tessera::forward or a "
                          "NoSyncScope given both the model and a submodule?"));
    EXPECT_TRUE(is_in_pass(*model->up));  // the refusal has not taken the unit from its root
    loss.backward();
    EXPECT_FALSE(is_in_pass(*model->up));
    unsharded->forward(mlp_input()).sum().backward();
    expect_gradients_of(*unsharded, *model, mesh);
  });
  test::on_ranks(1, [](const dist::Mesh& mesh) {
    test::Mlp model = sharded_mlp(mesh, FULL_SHARD);
    { const NoSyncScope no_sync(*model->up); }  // before the first forward: this is the root
    EXPECT_THAT(error_of([&] { forward(model, mlp_input()); }),
                HasSubstr("expected one root, found a second root"));
  });
}

// Shows B22.
TEST(PassFaultsAloneTest, AReplacedModuleIsNamed) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    test::Mlp model = sharded_mlp(mesh, FULL_SHARD);
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    forward(model, mlp_input()).sum().backward();
    model->middle = torch::nn::Linear(13, 11);
    model->replace_module("middle", model->middle);
    const std::string error = error_of([&] { forward(model, mlp_input()); });
    EXPECT_THAT(error, HasSubstr("middle.weight"));
    EXPECT_THAT(error, HasSubstr("replaced in its module?"));
  });
}

// Shows B22.
TEST(PassFaultsAloneTest, RanksWithUnitsOfDifferentSizesAreTold) {
  dist::MeshOptions options;
  options.timeout = std::chrono::milliseconds(1500);
  test::on_ranks(
      2,
      [](const dist::Mesh& mesh) {
        torch::nn::Linear model(4, mesh.rank() == 0 ? 3 : 5);
        fully_shard(*model, {.mesh = mesh});
        const std::string error = error_of([&] { forward(model, torch::ones({1, 4})); });
        EXPECT_THAT(error, HasSubstr("15 elements"));
        EXPECT_THAT(error, HasSubstr("25 elements"));
      },
      options);
}

// Shows B22.
TEST(PassFaultsAloneTest, APartOfAUnitCannotBecomeOneLater) {
  test::Mlp model;
  fully_shard(*model);
  EXPECT_THAT(error_of([&] { fully_shard(*model->middle); }), HasSubstr("inner modules first"));
  EXPECT_TRUE(fsdp_modules(*model->middle).empty());
}

// Shows B22.
TEST(PassFaultsAloneTest, WeightsTiedBetweenReplicateAndFullyShardAreRefused) {
  for (const bool replicated_first : {true, false}) {
    test::Transformer model;
    const auto shard = [&] { fully_shard(*model->embedding); };
    const auto copy = [&] { replicate(*model->head); };
    EXPECT_EQ(error_of([&] { replicated_first ? copy() : shard(); }), "none");
    const std::string error = error_of([&] { replicated_first ? shard() : copy(); });
    EXPECT_THAT(error, HasSubstr("weight")) << replicated_first;
    EXPECT_THAT(error, HasSubstr("tied")) << replicated_first;
  }
}

// Shows B22.
TEST(PassFaultsAloneTest, AnInitFunctionThatThrowsLeavesMetaTensors) {
  test::Mlp model = on_meta_device([] { return test::Mlp(); });
  int num_calls = 0;
  FullyShardOptions options;
  options.param_init_fn = [&](torch::nn::Module& module) {
    if (++num_calls == 2) throw std::runtime_error("the user's own");
    for (at::Tensor& parameter : module.parameters(false)) parameter.fill_(1);
  };
  EXPECT_THAT(error_of([&] { fully_shard(*model, options); }), HasSubstr("the user's own"));
  fully_shard(*model, options);
  for (const at::Tensor& parameter : model->parameters()) {
    EXPECT_TRUE(parameter.detach().eq(1).all().item<bool>());
  }
}

/// A unit that has no parameters at all.
/// Shows B5.
TEST(PassFaultsAloneTest, AModuleWithoutParametersMayBeWrapped) {
  FullyShardedDataParallel<torch::nn::ReLU> relu(torch::nn::ReLU(), FullyShardOptions{});
  EXPECT_TRUE(relu(torch::ones({2}).neg()).eq(0).all().item<bool>());
  torch::nn::Sequential model(torch::nn::Linear(5, 5), torch::nn::ReLU());
  fully_shard(*model->ptr(1));
  fully_shard(*model);
  const ForwardScope scope(*model);
  EXPECT_TRUE(is_in_pass(*model->ptr(0)));
  EXPECT_TRUE(is_in_pass(*model->ptr(1)));
}

/// The root has no parameters of its own, and the first unit in it another dtype.
/// Shows B14.
TEST(PassFaultsAloneTest, InputsGetTheDtypeOfTheRoot) {
  for (const bool root_computes_in_bf16 : {true, false}) {
    torch::nn::Sequential net(torch::nn::Linear(5, 5), torch::nn::Linear(5, 5));
    MixedPrecision bf16{.param_dtype = at::kBFloat16};
    fully_shard(*net->ptr(0), {.mixed_precision = root_computes_in_bf16 ? MixedPrecision{} : bf16});
    fully_shard(*net->ptr(1));
    fully_shard(*net, {.mixed_precision = root_computes_in_bf16 ? bf16 : MixedPrecision{}});
    const ForwardScope scope(*net);
    EXPECT_EQ(scope.cast_input(torch::ones({1, 5})).scalar_type(),
              root_computes_in_bf16 ? at::kBFloat16 : at::kFloat);
  }
}

// Shows B22.
TEST(PassFaultsAloneTest, AWriteInAForwardIsToldByItsScopeThoughTheResultIsDropped) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    test::Mlp model = sharded_mlp(mesh, FULL_SHARD);
    const auto forward_that_writes = [&](int writing_rank) {
      const ForwardScope scope(*model);
      if (mesh.rank() == writing_rank) {
        const at::NoGradGuard no_grad;
        model->middle->bias.clamp_(0, 1);
      }
      static_cast<void>(model->forward(mlp_input()));
    };
    for (const int writing_rank : {0, 1}) {
      const std::string error = error_of([&] { forward_that_writes(writing_rank); });
      if (mesh.rank() == writing_rank) {
        EXPECT_THAT(error, HasSubstr("middle.bias"));
        EXPECT_THAT(error, HasSubstr("expected no write"));
      } else {
        EXPECT_THAT(error, HasSubstr("rank " + std::to_string(writing_rank) + " failed"));
      }
      EXPECT_FALSE(is_in_pass(*model));
      EXPECT_EQ(error_of([&] { forward(model, mlp_input()).sum().backward(); }), "none");
    }
  });
}

// Shows B22.
TEST(PassFaultsAloneTest, ABackwardThatFailsOnOneRankIsToldOnAll) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    test::Mlp unsharded = seeded<test::Mlp>();
    test::Mlp model = seeded<test::Mlp>();
    fully_shard(*model, {.mesh = mesh, .policy = ModuleWrapPolicy<torch::nn::Linear>()});
    const at::Tensor x = torch::linspace(-1, 1, 21).reshape({3, 7});
    for (int step = 0; step < 6; ++step) {
      const bool fails = step % 3 == 1;
      unsharded->zero_grad();
      model->zero_grad();
      unsharded->forward(x * step).pow(2).sum().backward();
      const auto loss = [&](ForwardScope& scope) {
        const at::Tensor up = torch::relu(model->up->forward(x * step));
        if (fails && mesh.rank() == 0) {
          up.register_hook([](at::Tensor) -> at::Tensor { throw std::runtime_error("mine"); });
        }
        const at::Tensor sum =
            model->down->forward(torch::tanh(model->middle->forward(up))).pow(2).sum();
        scope.watch(sum);
        return sum;
      };
      const std::string error = error_of([&] {
        std::optional<ForwardScope> scope(*model);
        const at::Tensor sum = loss(*scope);
        if (step < 3) scope.reset();  // in later steps the backward runs in the scope
        sum.backward();
      });
      if (fails) {
        EXPECT_THAT(error, HasSubstr(mesh.rank() == 0 ? "mine" : "rank 0 failed in the backward"));
      } else {
        EXPECT_EQ(error, "none");
        expect_gradients_of(*unsharded, *model, mesh);
      }
    }
  });
}

/// One rank alone fails anywhere in a forward: all get the error at once, and the next step works.
/// Shows B22.
TEST(PassFaultsAloneTest, AForwardThatFailsOnOneRankIsToldOnAll) {
  for (const int num_passes_before : {0, 1}) {
    for (int num_layers = 0; num_layers <= 2; ++num_layers) {
      test::on_ranks(2, [&](const dist::Mesh& mesh) {
        test::Mlp model = sharded_mlp(mesh, FULL_SHARD);
        for (int i = 0; i < num_passes_before; ++i) forward(model, mlp_input()).sum().backward();
        const std::string error = error_of([&] {
          const ForwardScope scope(*model);
          if (mesh.rank() == 0) {
            model->forward(mlp_input());
          } else {
            if (num_layers > 0) model->up->forward(mlp_input());
            if (num_layers > 1) model->middle->forward(torch::ones({1, 13}));
            throw std::runtime_error("the user's own");
          }
        });
        if (mesh.rank() == 0) {
          EXPECT_THAT(error, HasSubstr("rank 1 failed in the forward"));
        } else {
          EXPECT_EQ(error, "the user's own");
        }
        EXPECT_FALSE(is_in_pass(*model));
        EXPECT_EQ(error_of([&] { forward(model, mlp_input()).sum().backward(); }), "none");
      });
    }
  }
}

}  // namespace
}  // namespace tessera
