#include <gmock/gmock.h>
#include <torch/torch.h>

#include <random>

#include "runtime/support/checks.h"

// Ranks that use different parameters, and different units, in one pass.

namespace tessera {
namespace {

using test::expect_gradients_of;
using test::seeded;

constexpr int kWidth = 5;
constexpr int kNumExperts = 4;

/// Which experts a rank uses in a step, in this order.
using Route = std::vector<int>;

/// Layers (experts) of which each forward uses some.
struct RoutedImpl : torch::nn::Module {
  RoutedImpl() {
    first = register_module("first", torch::nn::Linear(kWidth, kWidth));
    for (int i = 0; i < kNumExperts; ++i) {
      experts.push_back(
          register_module("expert" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
    }
    last = register_module("last", torch::nn::Linear(kWidth, 2));
  }
  at::Tensor forward(const at::Tensor& x, const Route& route) {
    const at::Tensor hidden = torch::tanh(first->forward(x));
    at::Tensor sum = hidden;
    for (const int i : route) {
      sum = sum + torch::tanh(experts[static_cast<std::size_t>(i)]->forward(hidden));
    }
    return last->forward(sum);
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  std::vector<torch::nn::Linear> experts;
};
TORCH_MODULE(Routed);

/// A block with a branch that the caller may leave out.
struct BranchedImpl : torch::nn::Module {
  BranchedImpl() {
    always = register_module("always", torch::nn::Linear(kWidth, kWidth));
    sometimes = register_module("sometimes", torch::nn::Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x, bool takes_branch) {
    const at::Tensor y = torch::tanh(always->forward(x));
    return takes_branch ? y + sometimes->forward(x) : y;
  }
  torch::nn::Linear always{nullptr}, sometimes{nullptr};
};
TORCH_MODULE(Branched);

struct TwoBlocksImpl : torch::nn::Module {
  TwoBlocksImpl() {
    one = register_module("one", Branched());
    two = register_module("two", Branched());
  }
  at::Tensor forward(const at::Tensor& x, bool takes_branch) {
    return two->forward(one->forward(x, true), takes_branch);
  }
  Branched one{nullptr}, two{nullptr};
};
TORCH_MODULE(TwoBlocks);

at::Tensor rows_of(int rank, int step) {
  return torch::linspace(-1, 1, 2 * kWidth).reshape({2, kWidth}) * (rank + 1) + step * 0.1;
}

/// Runs the ranks' forwards on the unsharded model, so that `.grad`s get the average over ranks.
template <class Forward>
void add_average(int num_ranks, const Forward& forward_of) {
  for (int rank = 0; rank < num_ranks; ++rank) (forward_of(rank).sum() / num_ranks).backward();
}

dist::MeshOptions hybrid_if(ShardingStrategy strategy) {
  dist::MeshOptions options;
  if (strategy == HYBRID_SHARD || strategy == HYBRID_SHARD_ZERO2) {
    options.axes = {{"replicate", 2}, {"shard", -1}};
  }
  return options;
}

class UnevenUseTest : public ::testing::TestWithParam<ShardingStrategy> {
 protected:
  /// Compares gradients with the unsharded model's. `route_of(rank, step)`: the experts to use.
  void expect_average(int num_ranks, int num_steps,
                      const std::function<Route(int, int)>& route_of) {
    test::on_ranks(
        num_ranks,
        [&](const dist::Mesh& mesh) {
          Routed unsharded = seeded<Routed>();
          Routed model = seeded<Routed>();
          fully_shard(*model, {.mesh = mesh,
                               .policy = ModuleWrapPolicy<torch::nn::Linear>(),
                               .strategy = GetParam()});
          for (int step = 0; step < num_steps; ++step) {
            SCOPED_TRACE("step " + std::to_string(step));
            test::stand_at("step " + std::to_string(step));
            add_average(num_ranks, [&](int rank) {
              return unsharded->forward(rows_of(rank, step), route_of(rank, step));
            });
            forward(model, rows_of(mesh.rank(), step), route_of(mesh.rank(), step))
                .sum()
                .backward();
            expect_gradients_of(*unsharded, *model, mesh);
          }
        },
        hybrid_if(GetParam()));
  }
};

// Shows B10.
TEST_P(UnevenUseTest, ABranchOfTheLastBlockThatOneRankTakes) {
  test::on_ranks(
      2,
      [&](const dist::Mesh& mesh) {
        TwoBlocks unsharded = seeded<TwoBlocks>();
        TwoBlocks model = seeded<TwoBlocks>();
        fully_shard(*model,
                    {.mesh = mesh, .policy = ModuleWrapPolicy<Branched>(), .strategy = GetParam()});
        for (int step = 0; step < 3; ++step) {
          add_average(2,
                      [&](int rank) { return unsharded->forward(rows_of(rank, step), rank == 0); });
          forward(model, rows_of(mesh.rank(), step), mesh.rank() == 0).sum().backward();
          expect_gradients_of(*unsharded, *model, mesh);
        }
      },
      hybrid_if(GetParam()));
}

// Shows B10.
TEST_P(UnevenUseTest, EachRankUsesAnExpertOfItsOwn) {
  expect_average(2, 3, [](int rank, int) { return Route{rank}; });
  expect_average(4, 3, [](int rank, int) { return Route{3 - rank}; });
}

// Shows B10.
TEST_P(UnevenUseTest, RanksBeginAlikeAndPartLater) {
  expect_average(2, 6, [](int rank, int step) {
    if (step < 2) return Route{0, 1};
    return step % 2 == rank ? Route{0} : Route{2, 3};
  });
}

// Shows B10.
TEST_P(UnevenUseTest, OneRankUsesNoExpertAtAll) {
  expect_average(2, 3, [](int rank, int) { return rank == 0 ? Route{0, 1, 2, 3} : Route{}; });
  expect_average(4, 4, [](int rank, int step) { return rank == step ? Route{} : Route{2}; });
}

// Shows B10.
TEST_P(UnevenUseTest, OrdersThatDifferFromRankToRank) {
  expect_average(2, 4, [](int rank, int) { return rank == 0 ? Route{0, 1, 2} : Route{2, 1, 0}; });
  expect_average(2, 4, [](int rank, int step) {
    return (rank + step) % 2 == 0 ? Route{3, 0, 3} : Route{1, 3, 2};
  });
}

// Shows B10.
TEST_P(UnevenUseTest, RoutesDrawnAtRandom) {
  std::mt19937 generator(11);
  std::vector<std::vector<Route>> routes(12, std::vector<Route>(4));
  for (auto& step : routes) {
    for (Route& route : step) {
      for (int i = 0; i < kNumExperts; ++i) {
        if (generator() % 2 == 0) route.push_back(i);
      }
      std::shuffle(route.begin(), route.end(), generator);
    }
  }
  for (const int num_ranks : {2, 4}) {
    expect_average(num_ranks, 12, [&](int rank, int step) {
      return routes[static_cast<std::size_t>(step)][static_cast<std::size_t>(rank)];
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, UnevenUseTest,
                         ::testing::Values(FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD,
                                           HYBRID_SHARD_ZERO2),
                         [](const auto& test) { return std::string(to_string(test.param)); });

/// A unit whose frozen scale the backward still needs after the unit's gradients are complete.
struct AroundImpl : torch::nn::Module {
  AroundImpl() {
    scale = register_parameter("scale", torch::full({kWidth}, 2.0), /*requires_grad=*/false);
    shift = register_parameter("shift", torch::randn({kWidth}));
    weight = register_parameter("weight", torch::randn({kWidth}));
  }
  at::Tensor scale, shift, weight;
};
TORCH_MODULE(Around);

struct AroundAnotherImpl : torch::nn::Module {
  AroundAnotherImpl() {
    first = register_parameter("first", torch::randn({kWidth}));
    around = register_module("around", Around());
    between = register_module("between", torch::nn::Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x, bool shifts_last) {
    const at::Tensor scaled = x * first * around->scale;
    if (shifts_last) return between->forward(scaled) * around->weight + around->shift;
    return between->forward(scaled + around->shift) * around->weight;
  }
  at::Tensor first;
  Around around{nullptr};
  torch::nn::Linear between{nullptr};
};
TORCH_MODULE(AroundAnother);

// The backward of the first step reaches weight, between, shift, scale. In the second step the
// gradients of `around` are complete before `between` is reached. They are reduced after it, as in
// step 1, when `around` has been gathered ahead for its scale.
// Shows B10.
TEST(UnevenStepsTest, AUnitGatheredAheadOutlivesItsReduction) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    AroundAnother unsharded = seeded<AroundAnother>();
    AroundAnother model = seeded<AroundAnother>();
    fully_shard(*model->around, {.mesh = mesh});
    fully_shard(*model->between, {.mesh = mesh});
    fully_shard(*model, {.mesh = mesh});
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      const bool shifts_last = step > 0;
      add_average(2,
                  [&](int rank) { return unsharded->forward(rows_of(rank, step), shifts_last); });
      forward(model, rows_of(mesh.rank(), step), shifts_last).sum().backward();
      expect_gradients_of(*unsharded, *model, mesh);
    }
  });
}

/// Units of one size, so that collectives of different units would fit each other.
struct LayersImpl : torch::nn::Module {
  LayersImpl() {
    for (int i = 0; i < kNumExperts; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
    }
  }
  at::Tensor forward(at::Tensor x, const Route& route) {
    for (const int i : route) x = torch::tanh(layers[static_cast<std::size_t>(i)]->forward(x));
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Layers);

// Shows B1.
TEST(UnevenUseTest, TwoRootsInOneBackward) {
  for (const bool alternates : {false, true}) {
    test::on_ranks(
        2,
        [&](const dist::Mesh& mesh) {
          // By rank: which units of the second root it uses, step by step.
          const std::vector<std::vector<Route>> routes = {{{0}, {0, 2}, {1}, {1}, {3}, {3}},
                                                          {{1}, {1, 2}, {1}, {0}, {2}, {3}}};
          Layers a = seeded<Layers>();
          Layers b = seeded<Layers>();
          const FullyShardOptions options{.mesh = mesh,
                                          .policy = ModuleWrapPolicy<torch::nn::Linear>()};
          Layers sharded_a = seeded<Layers>();
          Layers sharded_b = seeded<Layers>();
          fully_shard(*sharded_a, options);
          fully_shard(*sharded_b, options);
          for (std::size_t step = 0; step < routes[0].size(); ++step) {
            test::stand_at("step " + std::to_string(step));
            const auto loss = [&](int rank, const auto& first, const auto& second) {
              const Route& route = routes[static_cast<std::size_t>(rank)][step];
              at::Tensor x = second(first(rows_of(rank, static_cast<int>(step)), {0, 1}), route);
              if (alternates) x = second(first(x, {1, 2}), {0});
              return x.sum();
            };
            for (int rank = 0; rank < 2; ++rank) {
              const at::Tensor sum = loss(
                  rank, [&](const at::Tensor& x, const Route& r) { return a->forward(x, r); },
                  [&](const at::Tensor& x, const Route& r) { return b->forward(x, r); });
              (sum / 2).backward();
            }
            loss(
                mesh.rank(),
                [&](const at::Tensor& x, const Route& r) { return forward(sharded_a, x, r); },
                [&](const at::Tensor& x, const Route& r) { return forward(sharded_b, x, r); })
                .backward();
            expect_gradients_of(*a, *sharded_a, mesh);
            expect_gradients_of(*b, *sharded_b, mesh);
          }
        },
        {.timeout = std::chrono::seconds(20)});
  }
}

// Rank 0 fails before the backward reaches the first root; rank 1 goes on there.
// Shows B1.
TEST(UnevenUseTest, TwoRootsOfWhichOneFailsOnOneRank) {
  test::on_ranks(
      2,
      [&](const dist::Mesh& mesh) {
        const FullyShardOptions options{.mesh = mesh,
                                        .policy = ModuleWrapPolicy<torch::nn::Linear>()};
        std::vector<Layers> roots;
        for (int i = 0; i < 3; ++i) {
          roots.push_back(seeded<Layers>());
          fully_shard(*roots.back(), options);
        }
        roots[1]->layers[1]->weight.register_hook([&](const at::Tensor& gradient) {
          if (mesh.rank() == 0) throw std::runtime_error("the user's own");
          return gradient;
        });
        EXPECT_THAT(test::error_of([&] {
                      const at::Tensor x = forward(roots[0], rows_of(mesh.rank(), 0), Route{0, 1});
                      forward(roots[1], x, Route{1, 2}).sum().backward();
                    }),
                    ::testing::HasSubstr(mesh.rank() == 0 ? "the user's own"
                                                          : "rank 0 failed in the backward"));
        Layers unsharded = seeded<Layers>();
        add_average(2, [&](int rank) { return unsharded->forward(rows_of(rank, 1), {0, 1}); });
        forward(roots[2], rows_of(mesh.rank(), 1), Route{0, 1}).sum().backward();
        expect_gradients_of(*unsharded, *roots[2], mesh);
      },
      {.timeout = std::chrono::seconds(20)});
}

/// A parameter that never required a gradient: libtorch has no autograd metadata for it.
struct WithConstantImpl : torch::nn::Module {
  WithConstantImpl() {
    scale = register_parameter("scale", torch::full({kWidth}, 2.0), /*requires_grad=*/false);
    linear = register_module("linear", torch::nn::Linear(kWidth, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return linear->forward(x * scale); }
  at::Tensor scale;
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(WithConstant);

// Shows B1.
TEST(FrozenTest, AParameterThatNeverRequiredAGradient) {
  for (const int num_ranks : {1, 2}) {
    test::on_ranks(num_ranks, [](const dist::Mesh& mesh) {
      WithConstant unsharded = seeded<WithConstant>();
      WithConstant model = seeded<WithConstant>();
      fully_shard(*model, {.mesh = mesh});
      const at::Tensor x = torch::ones({2, kWidth});
      for (int step = 0; step < 2; ++step) {
        unsharded->forward(x).sum().backward();
        forward(model, x).sum().backward();
      }
      expect_gradients_of(*unsharded, *model, mesh);
      EXPECT_FALSE(model->scale.requires_grad());
      EXPECT_FALSE(model->scale.grad().defined());
    });
  }
}

// Shows B1.
TEST(FrozenTest, AParameterListOfPlainTensors) {
  struct ListedImpl : torch::nn::Module {
    ListedImpl() {
      list = register_module("list", torch::nn::ParameterList());
      list->append(torch::ones({3}));
      linear = register_module("linear", torch::nn::Linear(3, 3));
    }
    at::Tensor forward(const at::Tensor& x) { return linear->forward(x) * list[0]; }
    torch::nn::ParameterList list{nullptr};
    torch::nn::Linear linear{nullptr};
  };
  const auto model = std::make_shared<ListedImpl>();
  fully_shard(*model);
  forward(*model, torch::ones({1, 3})).sum().backward();
  EXPECT_TRUE(model->linear->weight.grad().defined());
}

}  // namespace
}  // namespace tessera
