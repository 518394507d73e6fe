#include <gmock/gmock.h>
#include <torch/torch.h>

#include "runtime/support/checks.h"
#include "tessera/runtime/recompute/recompute.h"

namespace tessera {
namespace {

using test::error_of;
using test::expect_gradients_of;
using test::seeded;
using test::some_ids;
using ::testing::HasSubstr;

class RecomputeTest : public ::testing::TestWithParam<Recomputation> {
 protected:
  RecomputeOptions options() const { return {.recomputation = GetParam()}; }
  /// For ranks that are threads: they share one generator, which another rank may be seeding.
  RecomputeOptions options_of_ranks() const {
    return {.recomputation = GetParam(), .rng_state = RngState::leave};
  }
};

at::Tensor some_input() {
  return torch::linspace(-1, 1, 12).reshape({3, 4});
}

// Shows B19.
TEST_P(RecomputeTest, GradientsAreThoseOfTheFunction) {
  torch::nn::Linear linear = seeded<test::Mlp>()->up;
  const at::Tensor x = torch::linspace(-1, 1, 14).reshape({2, 7}).requires_grad_();
  const auto body = [linear](const at::Tensor& input, double factor) mutable {
    return torch::tanh(linear->forward(input) * factor).pow(2);
  };
  auto plain = body;
  plain(x, 0.5).sum().backward();
  const at::Tensor expected = x.grad().clone();
  const at::Tensor expected_weight = linear->weight.grad().clone();
  x.mutable_grad() = at::Tensor();
  linear->weight.mutable_grad() = at::Tensor();
  recompute(options(), body, x, 0.5).sum().backward();
  EXPECT_TRUE(x.grad().equal(expected));
  EXPECT_TRUE(linear->weight.grad().equal(expected_weight));
}

TEST_P(RecomputeTest, AFunctionRunsOncePerDirection) {
  const auto calls = std::make_shared<int>(0);
  const auto body = [calls](const at::Tensor& x) {
    ++*calls;
    return torch::tanh(torch::tanh(x));
  };
  const at::Tensor y = recompute(options(), body, some_input().requires_grad_());
  EXPECT_EQ(*calls, 1);
  y.sum().backward();
  EXPECT_EQ(*calls, 2);
  {
    const at::NoGradGuard no_grad;
    recompute(options(), body, some_input());
  }
  EXPECT_EQ(*calls, 3);
}

TEST_P(RecomputeTest, ModulesHoldersAndSeveralOutputs) {
  torch::nn::Linear linear = seeded<test::Mlp>()->up;
  const at::Tensor x = torch::ones({2, 7});
  recompute(options(), linear, x).sum().backward();
  EXPECT_TRUE(linear->weight.grad().defined());
  const auto [first, second] = recompute(
      options(), [](const at::Tensor& a) { return std::tuple(a.exp(), a.argmax(1)); }, x);
  EXPECT_TRUE(first.equal(x.exp()));
  EXPECT_EQ(second.scalar_type(), torch::kLong);
  const std::vector<at::Tensor> outputs = recompute(
      options(), [](const at::Tensor& a) { return a.chunk(2); }, some_input().requires_grad_());
  ASSERT_EQ(outputs.size(), 2U);
  outputs[1].sum().backward();
}

TEST_P(RecomputeTest, DropoutDrawsTheSameNumbersAgain) {
  test::with_generator([&] {
    const at::Tensor x = torch::ones({100}).requires_grad_();
    const auto body = [](const at::Tensor& input) {
      return torch::dropout(input * input, 0.5, true);
    };
    torch::manual_seed(5);
    const at::Tensor y = recompute(options(), body, x);
    const at::Tensor after = torch::rand({1});
    y.sum().backward();
    EXPECT_TRUE(x.grad().equal(y.detach() * 2));
    torch::manual_seed(5);
    body(x);
    EXPECT_TRUE(torch::rand({1}).equal(after));
  });
}

TEST_P(RecomputeTest, AutocastIsWhatItWasInTheForward) {
  const auto dtypes = std::make_shared<std::vector<at::ScalarType>>();
  const at::Tensor weight = torch::ones({4, 4}).requires_grad_();
  const auto body = [dtypes, weight](const at::Tensor& x) {
    const at::Tensor product = torch::matmul(x, weight);
    dtypes->push_back(product.scalar_type());
    return product.to(torch::kFloat);
  };
  at::Tensor y;
  {
    const test::AutocastToBFloat16 autocast;
    y = recompute(options(), body, some_input().requires_grad_());
  }
  y.sum().backward();
  EXPECT_THAT(*dtypes, ::testing::ElementsAre(at::kBFloat16, at::kBFloat16));
  EXPECT_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
}

// Autocast keeps the cast weights of a forward. The second forward, in the backward, must keep
// none.
TEST_P(RecomputeTest, AutocastUsesTheWeightsOfTheLastStep) {
  const at::Tensor weight = torch::ones({4, 4}).requires_grad_();
  const at::Tensor x = torch::ones({1, 4});
  for (int step = 1; step <= 3; ++step) {
    at::Tensor y;
    {
      const test::AutocastToBFloat16 autocast;
      y = recompute(
          options(), [&](const at::Tensor& input) { return torch::matmul(input, weight); }, x);
    }
    EXPECT_EQ(y[0][0].item<float>(), 4 * step);
    y.to(torch::kFloat).sum().backward();
    const at::NoGradGuard no_grad;
    weight.add_(1);
  }
}

TEST_P(RecomputeTest, ARetainedGraphIsComputedOnceMore) {
  const at::Tensor x = some_input().requires_grad_();
  const at::Tensor loss =
      recompute(
          options(), [](const at::Tensor& input) { return input.exp().tanh(); }, x)
          .sum();
  loss.backward({}, /*retain_graph=*/true);
  const at::Tensor once = x.grad().clone();
  loss.backward();
  EXPECT_TRUE(x.grad().equal(once * 2));
}

at::Tensor nested(const RecomputeOptions& options, int depth, const at::Tensor& x) {
  if (depth == 0) return x.sin();
  return recompute(
      options,
      [options, depth](const at::Tensor& input) {
        return nested(options, depth - 1, input).sin() + input;
      },
      x);
}

// Shows B19.
TEST_P(RecomputeTest, NestsSixtyDeep) {
  const at::Tensor x = some_input().requires_grad_();
  at::Tensor y = x.sin();
  for (int i = 0; i < 70; ++i) y = y.sin() + x;
  y.sum().backward();
  const at::Tensor expected = x.grad().clone();
  x.mutable_grad() = at::Tensor();
  nested(options(), 70, x).sum().backward();
  EXPECT_TRUE(torch::allclose(x.grad(), expected));
}

// Shows B19.
TEST_P(RecomputeTest, KeepsNoActivations) {
  // A tensor that the function makes is destroyed when the function returns.
  c10::weak_intrusive_ptr<c10::TensorImpl> inner(c10::intrusive_ptr<c10::TensorImpl>{});
  const at::Tensor y = recompute(
      options(),
      [&](const at::Tensor& x) {
        const at::Tensor hidden = x.exp();
        inner = c10::weak_intrusive_ptr<c10::TensorImpl>(hidden.getIntrusivePtr());
        return hidden * hidden;
      },
      some_input().requires_grad_());
  EXPECT_TRUE(inner.expired());
  y.sum().backward();
  EXPECT_TRUE(inner.expired());
}

// Shows B19.
TEST_P(RecomputeTest, UnitsAreGatheredAgainForTheSecondCall) {
  for (const int world_size : {1, 2, 3}) {
    for (const ShardingStrategy strategy : {FULL_SHARD, SHARD_GRAD_OP, NO_SHARD}) {
      test::on_ranks(world_size, [&](const dist::Mesh& mesh) {
        const auto model_of = [&] {
          test::Transformer model = seeded<test::Transformer>();
          model->recomputation = options_of_ranks();
          return model;
        };
        test::Transformer unsharded = seeded<test::Transformer>();
        test::Transformer model = model_of();
        fully_shard(
            *model,
            {.mesh = mesh, .policy = ModuleWrapPolicy<test::Block>(), .strategy = strategy});
        for (int step = 0; step < 3; ++step) {
          unsharded->forward(some_ids()).sum().backward();
          forward(model, some_ids()).sum().backward();
          expect_gradients_of(*unsharded, *model, mesh);
          for (const FlatParameterInfo& info : handles(*model)) EXPECT_FALSE(info.is_unsharded);
        }
      });
    }
  }
}

// Shows B19.
TEST_P(RecomputeTest, AWholeShardedModelInsideOne) {
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    test::Transformer unsharded = seeded<test::Transformer>();
    test::Transformer model = test::sharded_transformer(mesh);
    for (int step = 0; step < 2; ++step) {
      unsharded->forward(some_ids()).sum().backward();
      recompute(
          options_of_ranks(), [&](const at::Tensor& ids) { return forward(model, ids); },
          some_ids())
          .sum()
          .backward();
      expect_gradients_of(*unsharded, *model, mesh);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, RecomputeTest,
                         ::testing::Values(Recomputation::saved_tensors, Recomputation::reentrant),
                         [](const auto& way) {
                           return way.param == Recomputation::reentrant ? "reentrant"
                                                                        : "saved_tensors";
                         });

TEST(RecomputeWaysTest, AutogradGradWorksThroughSavedTensorsAndIsRefusedThroughReentrant) {
  const at::Tensor x = some_input().requires_grad_();
  const auto body = [](const at::Tensor& input) { return input.exp().tanh(); };
  const at::Tensor expected = torch::autograd::grad({body(x).sum()}, {x})[0];
  EXPECT_TRUE(torch::autograd::grad({recompute(body, x).sum()}, {x})[0].equal(expected));
  const RecomputeOptions reentrant{.recomputation = Recomputation::reentrant};
  EXPECT_THAT(
      error_of([&] {
        static_cast<void>(torch::autograd::grad({recompute(reentrant, body, x).sum()}, {x}));
      }),
      HasSubstr("torch::autograd::grad"));
}

TEST(RecomputeWaysTest, AFunctionThatIsNotTheSameTwiceIsNamed) {
  const auto calls = std::make_shared<int>(0);
  const at::Tensor y =
      recompute([calls](const at::Tensor& x) { return (*calls)++ == 0 ? x.exp().tanh() : x.exp(); },
                some_input().requires_grad_());
  EXPECT_THAT(error_of([&] { y.sum().backward(); }), HasSubstr("recomputed function saves"));
}

}  // namespace
}  // namespace tessera
