#include <gmock/gmock.h>
#include <torch/torch.h>

#include <thread>

#include "runtime/support/checks.h"

namespace tessera {
namespace {

using test::Block;
using test::error_of;
using test::expect_gradients_of;
using test::Mlp;
using test::mlp_input;
using test::MlpImpl;
using test::seeded;
using test::sharded_mlp;
using test::sharded_transformer;
using test::some_ids;
using test::Transformer;
using ::testing::HasSubstr;

void expect_idle(const torch::nn::Module& model) {
  for (const FlatParameterInfo& info : handles(model)) {
    EXPECT_FALSE(info.is_unsharded) << info.module_fqn;
  }
}

TEST(PassStatesTest, GradientsOfInputsByAutogradGrad) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp unsharded = seeded<Mlp>();
    Mlp model = sharded_mlp(mesh);
    const at::Tensor x = mlp_input().requires_grad_();
    const at::Tensor expected = torch::autograd::grad({unsharded->forward(x).sum()}, {x})[0];
    const at::Tensor found = torch::autograd::grad({forward(model, x).sum()}, {x})[0];
    EXPECT_TRUE(torch::allclose(found, expected));
    expect_idle(*model);
    EXPECT_EQ(model->up->weight.dim(), 1);
  });
}

TEST(PassStatesTest, GradientsOfParametersByAutogradGradAreThisRanksOwn) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp unsharded = seeded<Mlp>();
    Mlp model = sharded_mlp(mesh);
    const at::Tensor x = mlp_input() * (mesh.rank() + 1);
    const at::Tensor expected =
        torch::autograd::grad({unsharded->forward(x).sum()}, {unsharded->middle->weight})[0];
    const at::Tensor found =
        torch::autograd::grad({forward(model, x).sum()}, {model->middle->weight})[0];
    ASSERT_EQ(found.sizes(), expected.sizes());
    EXPECT_TRUE(torch::allclose(found, expected));
    expect_idle(*model);
    EXPECT_FALSE(model->middle->weight.grad().defined());
  });
}

TEST(PassStatesTest, CreateGraphIsRefusedByName) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = sharded_mlp(mesh);
    const at::Tensor loss = forward(model, mlp_input()).sum();
    const std::string error =
        error_of([&] { loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true); });
    EXPECT_THAT(error, HasSubstr("down."));
    EXPECT_THAT(error, HasSubstr("create_graph"));
    forward(model, mlp_input()).sum().backward();
    expect_idle(*model);
  });
}

TEST(PassStatesTest, ADoubleBackwardThroughAnEndedPassIsRefusedByName) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = sharded_mlp(mesh);
    const at::Tensor x = mlp_input().requires_grad_();
    at::Tensor output;
    {
      ForwardScope scope(*model);
      output = model->forward(x);
    }
    const at::Tensor gradient = torch::autograd::grad({output.sum()}, {x}, {}, true, true)[0];
    EXPECT_THAT(error_of([&] { gradient.pow(2).sum().backward(); }),
                HasSubstr("parameter of a fully sharded module: expected use within "
                          "tessera::forward or its backward"));
  });
}

TEST(PassStatesTest, InferenceModeBetweenSteps) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp unsharded = seeded<Mlp>();
    Mlp model = sharded_mlp(mesh);
    at::Tensor expected = unsharded->forward(mlp_input());
    expected.sum().backward();
    for (int i = 0; i < 2; ++i) {
      const c10::InferenceMode inference;
      EXPECT_TRUE(torch::allclose(forward(model, mlp_input()), expected));
      expect_idle(*model);
    }
    forward(model, mlp_input()).sum().backward();
    expect_gradients_of(*unsharded, *model, mesh);
    {
      const c10::InferenceMode inference;
      EXPECT_TRUE(torch::allclose(forward(model, mlp_input()), expected));
    }
    forward(model, mlp_input()).sum().backward();
    expect_gradients_of(*unsharded, *model, mesh, 2);
  });
}

TEST(PassStatesTest, ForwardsWithoutBackwardPileNothingUp) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp unsharded = seeded<Mlp>();
    Mlp model = sharded_mlp(mesh);
    unsharded->forward(mlp_input()).sum().backward();
    for (int i = 0; i < 5; ++i) static_cast<void>(forward(model, mlp_input()));
    forward(model, mlp_input()).sum().backward();
    expect_gradients_of(*unsharded, *model, mesh);
    expect_idle(*model);
  });
}

/// One of two branches, as the caller says.
struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    left = register_module("left", torch::nn::Linear(5, 3));
    right = register_module("right", torch::nn::Linear(5, 3));
    last = register_module("last", torch::nn::Linear(3, 2));
  }
  at::Tensor forward(const at::Tensor& x, bool goes_left) {
    return last->forward(torch::relu(goes_left ? left->forward(x) : right->forward(x)));
  }
  torch::nn::Linear left{nullptr}, right{nullptr}, last{nullptr};
};
TORCH_MODULE(Branches);

TEST(PassStatesTest, UnusedParametersHaveNoGradient) {
  for (const bool has_units : {true, false}) {
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      Branches unsharded = seeded<Branches>();
      Branches model = seeded<Branches>();
      FullyShardOptions options{.mesh = mesh};
      if (has_units) options.policy = ModuleWrapPolicy<torch::nn::Linear>();
      fully_shard(*model, options);
      const at::Tensor x = torch::linspace(0, 1, 10).reshape({2, 5});
      for (const bool goes_left : {true, true, false}) {
        unsharded->forward(x, goes_left).sum().backward();
        forward(model, x, goes_left).sum().backward();
        expect_idle(*model);
      }
      expect_gradients_of(*unsharded, *model, mesh);
      EXPECT_TRUE(model->left->weight.grad().defined());
    });
  }
}

TEST(PassStatesTest, ABranchThatOnlyOneRankTakesIsTrainedOnAll) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Branches unsharded = seeded<Branches>();
    Branches model = seeded<Branches>();
    fully_shard(*model, {.mesh = mesh, .policy = ModuleWrapPolicy<torch::nn::Linear>()});
    const at::Tensor x = torch::ones({2, 5});
    for (int i = 0; i < 4; ++i) {
      for (const int rank : {0, 1}) {
        (unsharded->forward(x, i < 2 || rank == 0).sum() / 2).backward();
      }
      forward(model, x, i < 2 || mesh.rank() == 0).sum().backward();
      expect_gradients_of(*unsharded, *model, mesh);
    }
  });
}

/// A frozen base with a small trained addition, as in LoRA.
struct AdaptedImpl : torch::nn::Module {
  AdaptedImpl() {
    base = register_module("base",
                           torch::nn::Sequential(torch::nn::Linear(5, 5), torch::nn::Linear(5, 5)));
    first = register_module("first", torch::nn::Linear(5, 5));
    for (at::Tensor& parameter : base->parameters()) parameter.requires_grad_(false);
    last = register_module("last", torch::nn::Linear(5, 2));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor h = first->forward(x);
    return last->forward(torch::tanh(base->forward(h) + h));
  }
  torch::nn::Sequential base{nullptr};
  torch::nn::Linear first{nullptr}, last{nullptr};
};
TORCH_MODULE(Adapted);

TEST(PassStatesTest, FrozenUnitsAreFreedInTheBackward) {
  for (const ShardingStrategy strategy : {FULL_SHARD, SHARD_GRAD_OP, NO_SHARD}) {
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      Adapted unsharded = seeded<Adapted>();
      Adapted model = seeded<Adapted>();
      fully_shard(
          *model,
          {.mesh = mesh, .policy = ModuleWrapPolicy<torch::nn::Linear>(), .strategy = strategy});
      const at::Tensor x = torch::linspace(0, 1, 10).reshape({2, 5});
      at::Tensor output = forward(model, x);
      // When the first layer's gradient is computed, later frozen layers must already be freed.
      std::vector<std::string> open;
      for (int i = 0; i < 2; ++i) {
        if (i > 0) output = forward(model, x);
        output.sum().backward();
        unsharded->forward(x).sum().backward();
        expect_idle(*model);
        expect_gradients_of(*unsharded, *model, mesh);
        EXPECT_FALSE(model->base[0]->as<torch::nn::Linear>()->weight.grad().defined());
      }
    });
  }
}

TEST(PassStatesTest, AUnitUsedTwiceInOneForward) {
  struct TwiceImpl : torch::nn::Module {
    TwiceImpl() {
      inner = register_module("inner", torch::nn::Linear(4, 4));
      between = register_module("between", torch::nn::Linear(4, 4));
    }
    at::Tensor forward(const at::Tensor& x) {
      return inner->forward(torch::tanh(between->forward(torch::tanh(inner->forward(x)))));
    }
    torch::nn::Linear inner{nullptr}, between{nullptr};
  };
  for (const ShardingStrategy strategy : {FULL_SHARD, SHARD_GRAD_OP, NO_SHARD}) {
    test::on_ranks(3, [&](const dist::Mesh& mesh) {
      std::shared_ptr<TwiceImpl> unsharded, model;
      test::with_generator([&] {
        torch::manual_seed(1);
        unsharded = std::make_shared<TwiceImpl>();
        torch::manual_seed(1);
        model = std::make_shared<TwiceImpl>();
      });
      fully_shard(
          *model,
          {.mesh = mesh, .policy = ModuleWrapPolicy<torch::nn::Linear>(), .strategy = strategy});
      for (int i = 0; i < 2; ++i) {
        const at::Tensor x = torch::ones({2, 4});
        unsharded->forward(x).sum().backward();
        forward(model, x).sum().backward();
        expect_gradients_of(*unsharded, *model, mesh);
      }
    });
  }
}

TEST(PassStatesTest, ABackwardInsideTheScopeEndsWithIt) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp unsharded = seeded<Mlp>();
    Mlp model = sharded_mlp(mesh);
    for (int step = 1; step <= 2; ++step) {
      unsharded->forward(mlp_input()).sum().backward();
      {
        const ForwardScope scope(*model);
        model->forward(mlp_input()).sum().backward();
      }
      expect_idle(*model);
      expect_gradients_of(*unsharded, *model, mesh);
    }
  });
}

TEST(PassStatesTest, ShardGradOpGathersOncePerStep) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = sharded_mlp(mesh, SHARD_GRAD_OP);
    for (int step = 0; step < 2; ++step) {
      forward(model, mlp_input()).sum().backward();
      EXPECT_THAT(recorded_order(*model),
                  ::testing::ElementsAre("unshard up", "unshard middle", "unshard down",
                                         "reduce down", "reduce middle", "reduce up"));
    }
  });
}

TEST(PassStatesTest, UserThreadsMayRunTheForward) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp unsharded = seeded<Mlp>();
    Mlp model = sharded_mlp(mesh);
    unsharded->forward(mlp_input()).sum().backward();
    at::Tensor output;
    std::thread([&] { output = forward(model, mlp_input()); }).join();
    std::thread([&] { output.sum().backward(); }).join();
    expect_gradients_of(*unsharded, *model, mesh);
    expect_idle(*model);
  });
}

// Shows B22.
TEST(PassStatesTest, UseOutsideAPassIsNamed) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = sharded_mlp(mesh);
    EXPECT_THAT(error_of([&] { model->forward(mlp_input()); }),
                HasSubstr("up.weight: parameter of a fully sharded module: expected use within "
                          "tessera::forward"));
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : model->parameters()) parameter.mul_(1);  // as an optimizer would
  });
}

// Shows B22.
TEST(PassStatesTest, ABackwardOutsideAPassIsNamed) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = sharded_mlp(mesh, NO_SHARD);
    EXPECT_THAT(error_of([&] { model->forward(mlp_input()).sum().backward(); }),
                HasSubstr("parameter of a fully sharded module: expected a backward of a forward "
                          "that tessera::forward ran"));
  });
}

}  // namespace
}  // namespace tessera
