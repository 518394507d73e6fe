#include <gmock/gmock.h>
#include <torch/torch.h>

#include <functional>
#include <random>
#include <stdexcept>

#include "runtime/embedding/tables.h"
#include "runtime/support/checks.h"
#include "support/error_matchers.h"

// Tables, and units that only some ranks use, under one root. A rank that waits in the tables'
// messages cannot take part in the units' gathers and reductions.

namespace tessera {
namespace {

constexpr int kExpertWidth = 4;
constexpr int kNumExperts = 3;

/// Which experts a rank uses, before it looks up its batch and afterwards.
struct Route {
  std::vector<int> before;
  std::vector<int> after;
};

struct ExpertsAndTablesImpl : torch::nn::Module {
  explicit ExpertsAndTablesImpl(std::shared_ptr<EmbeddingBagCollectionBase> its_tables)
      : tables(register_module("tables", std::move(its_tables))) {
    for (int i = 0; i < kNumExperts; ++i) {
      experts.push_back(register_module("expert" + std::to_string(i),
                                        torch::nn::Linear(kExpertWidth, kExpertWidth)));
    }
    narrow = register_module("narrow", torch::nn::Linear(32, kExpertWidth));
    const torch::NoGradGuard no_grad;
    for (const auto& child : named_children()) {
      if (child.key() == "tables") continue;
      for (at::Tensor& parameter : child.value()->parameters()) {
        parameter.copy_(torch::linspace(-0.5, 0.4, parameter.numel()).view(parameter.sizes()));
      }
    }
  }
  at::Tensor forward(
      const KeyedJaggedTensor& batch, std::int64_t batch_size, const Route& route,
      const std::function<at::Tensor(const at::Tensor&)>& and_then = [](const auto& x) {
        return x;
      }) {
    at::Tensor hidden = torch::ones({batch_size, kExpertWidth});
    const auto use = [&](const std::vector<int>& numbers) {
      for (const int i : numbers) {
        hidden = hidden + torch::tanh(experts[static_cast<std::size_t>(i)]->forward(hidden));
      }
    };
    use(route.before);
    hidden = hidden * narrow->forward(and_then(tables->forward(batch).values()));
    use(route.after);
    return torch::tanh(hidden).sum();
  }
  std::shared_ptr<EmbeddingBagCollectionBase> tables;
  std::vector<torch::nn::Linear> experts;
  torch::nn::Linear narrow{nullptr};
};
TORCH_MODULE(ExpertsAndTables);

std::shared_ptr<EmbeddingBagCollectionBase> sharded_tables(const dist::Mesh& mesh) {
  return shard(test::small_collection(), test::plan_of(test::plan_kind("mixed"), mesh.world_size()),
               mesh);
}

void shard_units(ExpertsAndTables& model, const dist::Mesh& mesh, ShardingStrategy strategy) {
  fully_shard(
      *model,
      {.mesh = mesh, .policy = ModuleWrapPolicy<torch::nn::Linear>(), .strategy = strategy});
}

torch::optim::SGD sgd(const ExpertsAndTables& model) {
  return torch::optim::SGD(parameters(*model), torch::optim::SGDOptions(0.01));
}

dist::MeshOptions hybrid_if(ShardingStrategy strategy) {
  dist::MeshOptions options;
  if (strategy == HYBRID_SHARD) options.axes = {{"replicate", 2}, {"shard", -1}};
  return options;
}

class UnevenUseWithTablesTest : public ::testing::TestWithParam<ShardingStrategy> {
 protected:
  /// Trains a sharded and an unsharded model, and compares all parameters. `route_of(rank, step)`:
  /// the experts that a rank uses in a step.
  void expect_training(int num_ranks, int num_steps,
                       const std::function<Route(int, int)>& route_of) {
    test::on_ranks(
        num_ranks,
        [&](const dist::Mesh& mesh) {
          at::set_num_threads(1);
          ExpertsAndTables unsharded(
              std::make_shared<EmbeddingBagCollection>(test::small_collection()));
          ExpertsAndTables model(sharded_tables(mesh));
          shard_units(model, mesh, GetParam());
          auto optimizer = sgd(model);
          auto optimizer_of_unsharded = sgd(unsharded);
          const auto batch_size = [&](int rank, int step) {
            return test::small_batch_size(rank, step);
          };
          for (int step = 0; step < num_steps; ++step) {
            test::stand_at("step " + std::to_string(step));
            for (int rank = 0; rank < num_ranks; ++rank) {
              (unsharded->forward(test::small_batch(rank, step), batch_size(rank, step),
                                  route_of(rank, step)) /
               num_ranks)
                  .backward();
            }
            forward(model, test::small_batch(mesh.rank(), step), batch_size(mesh.rank(), step),
                    route_of(mesh.rank(), step))
                .backward();
            for (torch::optim::Optimizer* each :
                 std::vector<torch::optim::Optimizer*>{&optimizer, &optimizer_of_unsharded}) {
              each->step();
              each->zero_grad();
            }
          }
          const StateDict whole = state_dict(*model, {.type = FULL});
          for (const auto& parameter : unsharded->named_parameters()) {
            const at::Tensor found = whole.tensor(parameter.key());
            EXPECT_TRUE(torch::allclose(found, parameter.value(), 1e-4, 1e-5))
                << parameter.key() << " differs by up to "
                << (found - parameter.value()).abs().max().item<double>() << " of "
                << found.abs().max().item<double>();
          }
        },
        hybrid_if(GetParam()));
  }
};

// Shows D5.
TEST_P(UnevenUseWithTablesTest, AnExpertThatOneRankUsesBeforeTheTables) {
  expect_training(2, 4, [](int rank, int) { return rank == 0 ? Route{{0}, {}} : Route{}; });
  expect_training(2, 4, [](int rank, int) { return rank == 0 ? Route{} : Route{{0, 2}, {1}}; });
}

// Shows D5.
TEST_P(UnevenUseWithTablesTest, AnExpertThatRanksUseOnEitherSideOfTheTables) {
  expect_training(2, 4, [](int rank, int) { return rank == 0 ? Route{{0}, {}} : Route{{}, {0}}; });
  expect_training(2, 8, [](int rank, int step) {
    return (rank + step / 2) % 2 == 0 ? Route{{0}, {1}} : Route{{1}, {0, 2}};
  });
}

// Shows D5.
TEST_P(UnevenUseWithTablesTest, RoutesDrawnAtRandom) {
  std::mt19937 generator(5);
  std::vector<std::vector<Route>> routes(20, std::vector<Route>(4));
  for (auto& step : routes) {
    for (Route& route : step) {
      for (int i = 0; i < kNumExperts; ++i) {
        if (generator() % 2 == 0) route.before.push_back(i);
        if (generator() % 2 == 0) route.after.push_back(i);
      }
      std::ranges::shuffle(route.before, generator);
      std::ranges::shuffle(route.after, generator);
    }
  }
  for (const int num_ranks : {2, 4}) {
    expect_training(num_ranks, 20, [&](int rank, int step) {
      return routes[static_cast<std::size_t>(step)][static_cast<std::size_t>(rank)];
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Strategies, UnevenUseWithTablesTest,
                         ::testing::Values(FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD),
                         [](const auto& test) { return std::string(to_string(test.param)); });

/// A model that looks up nothing on one rank.
struct SometimesImpl : torch::nn::Module {
  explicit SometimesImpl(std::shared_ptr<EmbeddingBagCollectionBase> its_tables)
      : tables(register_module("tables", std::move(its_tables))),
        narrow(register_module("narrow", torch::nn::Linear(32, kExpertWidth))) {}
  at::Tensor forward(const std::optional<KeyedJaggedTensor>& batch, bool learns) {
    if (!batch) return narrow->forward(torch::ones({1, 32})).sum();
    const at::Tensor pooled = tables->forward(*batch).values();
    return narrow->forward(learns ? pooled : pooled.detach()).sum();
  }
  std::shared_ptr<EmbeddingBagCollectionBase> tables;
  torch::nn::Linear narrow{nullptr};
};
TORCH_MODULE(Sometimes);

// Shows D5.
TEST(UnevenUseWithTablesTest, TablesThatOneRankDoesNotUseAreAnErrorOnAll) {
  for (const ShardingStrategy strategy : {FULL_SHARD, NO_SHARD}) {
    for (const int num_steps_before : {0, 2}) {
      for (const bool in_backward : {false, true}) {
        test::on_ranks(2, [&](const dist::Mesh& mesh) {
          Sometimes model(sharded_tables(mesh));
          fully_shard(*model, {.mesh = mesh, .strategy = strategy});
          const std::optional<KeyedJaggedTensor> batch = test::small_batch(0, 0);
          const auto train = [&] { forward(model, batch, true).backward(); };
          for (int step = 0; step < num_steps_before; ++step) train();
          const bool is_odd = mesh.rank() == 1;
          const auto train_otherwise = [&] {
            forward(model, in_backward || !is_odd ? batch : std::nullopt, !is_odd).backward();
          };
          EXPECT_THAT(train_otherwise,
                      test::ThrowsError(ErrorKind::mismatch,
                                        "to run the collectives of tables in the " +
                                            std::string(in_backward ? "backward" : "forward") +
                                            ", found rank 0 ready to do so, but rank 1 about to "
                                            "start no more collectives"));
          for (int step = 0; step < 2; ++step) train();
        });
      }
    }
  }
}

/// Passes gradients through, or throws.
struct FailsInBackward : torch::autograd::Function<FailsInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            bool fails) {
    context->saved_data["fails"] = fails;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    if (context->saved_data["fails"].toBool()) throw std::runtime_error("out of luck");
    return {gradients[0], at::Tensor()};
  }
};

// Shows B22.
TEST(UnevenUseWithTablesTest, ARankThatFailsBeforeTheTablesIsNamedToTheOthers) {
  for (const ShardingStrategy strategy : {FULL_SHARD, HYBRID_SHARD}) {
    for (const bool in_backward : {false, true}) {
      test::on_ranks(
          4,
          [&](const dist::Mesh& mesh) {
            ExpertsAndTables model(sharded_tables(mesh));
            shard_units(model, mesh, strategy);
            const KeyedJaggedTensor batch = test::small_batch(0, 0);
            const auto train = [&](bool fails) {
              ForwardScope scope(*model);
              const Route route = mesh.rank() == 2 ? Route{{0}, {1}} : Route{{}, {1}};
              const bool fails_here = fails && mesh.rank() == 1;
              if (fails_here && !in_backward) throw std::runtime_error("out of luck");
              const at::Tensor loss = model->forward(
                  batch, test::small_batch_size(0, 0), route, [&](const at::Tensor& pooled) {
                    return FailsInBackward::apply(pooled, fails_here && in_backward);
                  });
              scope.watch(loss);
              return loss;
            };
            for (int step = 0; step < 6; ++step) {
              test::stand_at("step " + std::to_string(step));
              const bool fails = step == 3;
              const std::string error = test::error_of([&] { train(fails).backward(); });
              if (!fails) {
                EXPECT_EQ(error, "none") << step;
              } else if (mesh.rank() == 1) {
                EXPECT_THAT(error, ::testing::HasSubstr("out of luck"));
              } else {
                EXPECT_THAT(
                    error, ::testing::HasSubstr("rank 1 failed in the " +
                                                std::string(in_backward ? "backward" : "forward")));
              }
            }
          },
          hybrid_if(strategy));
    }
  }
}

// Shows D5.
TEST(UnevenUseWithTablesTest, TablesThatAreReplacedLaterAreNamed) {
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    Sometimes model(sharded_tables(mesh));
    fully_shard(*model, {.mesh = mesh});
    const std::optional<KeyedJaggedTensor> batch = test::small_batch(0, 0);
    forward(model, batch, true).backward();
    model->replace_module("tables", sharded_tables(mesh));
    EXPECT_THAT([&] { forward(model, batch, true); },
                test::ThrowsError(ErrorKind::invalid_argument,
                                  "tables: embedding tables in a fully sharded model"));
    EXPECT_FALSE(is_in_pass(*model));
  });
}

}  // namespace
}  // namespace tessera
