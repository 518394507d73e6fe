#include <gmock/gmock.h>
#include <torch/torch.h>

#include "runtime/support/checks.h"
#include "support/error_matchers.h"

namespace tessera {
namespace {

using test::Block;
using test::Mlp;
using test::Transformer;
using ::testing::ElementsAre;

std::vector<std::string> units_of(const torch::nn::Module& module) {
  std::vector<std::string> units;
  for (const auto& [fqn, unit] : fsdp_modules(module)) units.push_back(fqn);
  return units;
}

// Shows B6.
TEST(PolicyTest, ByTypeOfModuleOrHolder) {
  Transformer by_holder;
  fully_shard(*by_holder, {.policy = ModuleWrapPolicy<Block>()});
  EXPECT_THAT(units_of(*by_holder), ElementsAre("", "blocks.0", "blocks.1", "blocks.2"));
  Transformer by_class;
  fully_shard(*by_class, {.policy = ModuleWrapPolicy<test::BlockImpl, torch::nn::LayerNormImpl>()});
  EXPECT_THAT(units_of(*by_class),
              ElementsAre("", "blocks.0", "blocks.0.norm", "blocks.1", "blocks.1.norm", "blocks.2",
                          "blocks.2.norm", "norm"));
}

// Shows B6.
TEST(PolicyTest, BySizeOfWhatNoUnitBelowHas) {
  // up has 104 elements, middle 154, down 36.
  Mlp model;
  fully_shard(*model, {.policy = SizeBasedPolicy(100)});
  EXPECT_THAT(units_of(*model), ElementsAre("", "up", "middle"));
  Mlp small;
  fully_shard(*small, {.policy = SizeBasedPolicy(1'000)});
  EXPECT_THAT(units_of(*small), ElementsAre(""));
}

// Shows B6.
TEST(PolicyTest, ByAFunction) {
  Mlp model;
  const torch::nn::Module* const middle = model->middle.ptr().get();
  fully_shard(*model, {.policy = LambdaPolicy([middle](const torch::nn::Module& module) {
                         return &module == middle;
                       })});
  EXPECT_THAT(units_of(*model), ElementsAre("", "middle"));
}

/// Records which modules it is asked about.
class Asking final : public FsdpPolicy {
 public:
  Asking(std::vector<std::string>& asked, const torch::nn::Module& root)
      : asked_(&asked), root_(&root) {}
  bool recurse(const torch::nn::Module&, std::int64_t) const override { return true; }
  bool wrap(const torch::nn::Module& module, std::int64_t nonwrapped_numel) const override {
    for (const auto& each : root_->named_modules("", false)) {
      if (each.value().get() != &module) continue;
      asked_->push_back(each.key() + " " + std::to_string(nonwrapped_numel));
    }
    return module.as<Block>() != nullptr;
  }

 private:
  std::vector<std::string>* asked_;
  const torch::nn::Module* root_;
};

// Shows B7.
TEST(PolicyTest, WalksFromTheLeavesUpAndLeftToRight) {
  Transformer model(1, 4);
  std::vector<std::string> asked;
  fully_shard(*model, {.policy = Asking(asked, *model)});
  EXPECT_THAT(asked,
              ElementsAre("embedding 76", "blocks.0.norm 8", "blocks.0.up 60", "blocks.0.down 52",
                          "blocks.0 120", "blocks 0", "norm 8", "head 76"));
}

// Shows B7.
TEST(PolicyTest, DoesNotDescendIntoWhatAnotherApiWasAppliedTo) {
  Transformer model(2, 4);
  replicate(*model->blocks[0]);
  std::vector<std::string> asked;
  fully_shard(*model, {.policy = Asking(asked, *model)});
  EXPECT_THAT(asked, ::testing::Not(::testing::Contains(::testing::StartsWith("blocks.0"))));
  EXPECT_THAT(units_of(*model), ElementsAre("", "blocks.1"));
}

// Shows B7.
TEST(PolicyTest, AModuleThatStandsInTheTreeTwiceIsOneUnit) {
  struct SharedImpl : torch::nn::Module {
    SharedImpl() {
      const torch::nn::Linear linear(3, 3);
      first = register_module("first", linear);
      second = register_module("second", linear);
    }
    at::Tensor forward(const at::Tensor& x) { return second->forward(first->forward(x)); }
    torch::nn::Linear first{nullptr}, second{nullptr};
  };
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    const auto make = [] {
      std::shared_ptr<SharedImpl> model;
      test::with_generator([&] {
        torch::manual_seed(2);
        model = std::make_shared<SharedImpl>();
      });
      return model;
    };
    const auto unsharded = make();
    const auto model = make();
    fully_shard(*model, {.mesh = mesh, .policy = ModuleWrapPolicy<torch::nn::Linear>()});
    EXPECT_EQ(handles(*model).at(0).module_fqn, "first");
    for (int step = 0; step < 2; ++step) {
      unsharded->forward(torch::ones({2, 3})).sum().backward();
      forward(model, torch::ones({2, 3})).sum().backward();
      test::expect_gradients_of(*unsharded, *model, mesh);
    }
  });
}

/// Compares gradient norms of several types, under every strategy, with torch's own.
class ClipTest : public ::testing::TestWithParam<std::tuple<ShardingStrategy, double>> {};

// Shows B12.
TEST_P(ClipTest, NormsAndClippedGradientsAreThoseOfTheUnshardedModel) {
  const auto [strategy, norm_type] = GetParam();
  test::on_ranks(3, [strategy = strategy, norm_type = norm_type](const dist::Mesh& mesh) {
    Mlp unsharded = test::seeded<Mlp>();
    Mlp model = test::seeded<Mlp>();
    fully_shard(*model->middle, {.mesh = mesh, .strategy = NO_SHARD});  // a mix of strategies
    replicate(*model->down, {.mesh = mesh});
    fully_shard(*model, {.mesh = mesh, .strategy = strategy});
    const at::Tensor x = torch::linspace(-1, 1, 14).reshape({2, 7});
    unsharded->forward(x).pow(2).sum().backward();
    forward(model, x).pow(2).sum().backward();
    const double expected =
        torch::nn::utils::clip_grad_norm_(unsharded->parameters(), 0.1, norm_type);
    for (const double impossible : {-1.0, std::nan("")}) {
      EXPECT_THAT([&] { clip_grad_norm_(*model, impossible, norm_type); },
                  test::ThrowsError(ErrorKind::invalid_argument, "max_norm"));
    }
    EXPECT_NEAR(clip_grad_norm_(*model, 0.1, norm_type) / expected, 1, 1e-5);
    test::expect_gradients_of(*unsharded, *model, mesh);
    EXPECT_TRUE(torch::allclose(model->down->weight.grad(), unsharded->down->weight.grad(), 1e-5));
  });
}

INSTANTIATE_TEST_SUITE_P(
    StrategiesAndNorms, ClipTest,
    ::testing::Combine(::testing::Values(FULL_SHARD, SHARD_GRAD_OP, NO_SHARD),
                       ::testing::Values(1.0, 2.0, 3.0, std::numeric_limits<double>::infinity())));

}  // namespace
}  // namespace tessera
