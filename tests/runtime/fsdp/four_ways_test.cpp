#include <gmock/gmock.h>
#include <torch/torch.h>

#include "runtime/support/checks.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// mod{sub1{subsub1, subsub2}, sub2{subsub1, subsub2}}, each with a layer of its own. With options,
/// the constructor wraps the submodules.
struct SubImpl : torch::nn::Module {
  explicit SubImpl(int width) {
    subsub1 = register_module("subsub1", torch::nn::Linear(width, 3));
    subsub2 = register_module("subsub2", torch::nn::Linear(3, width));
    scale = register_parameter("scale", torch::ones({width}));
  }
  at::Tensor forward(const at::Tensor& x) {
    return subsub2->forward(torch::tanh(subsub1->forward(x))) * scale;
  }
  torch::nn::Linear subsub1{nullptr}, subsub2{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(Sub);

struct ModImpl : torch::nn::Module {
  ModImpl() {
    sub1 = register_module("sub1", Sub(4));
    sub2 = register_module("sub2", Sub(4));
    shift = register_parameter("shift", torch::full({4}, 0.5));
  }
  at::Tensor forward(const at::Tensor& x) {
    return sub2->forward(sub1->forward(x + shift)) + shift;
  }
  Sub sub1{nullptr}, sub2{nullptr};
  at::Tensor shift;
};
TORCH_MODULE(Mod);

struct WrappedModImpl : torch::nn::Module {
  explicit WrappedModImpl(const FullyShardOptions& options) {
    sub1 = register_module("sub1", FullyShardedDataParallel<Sub>(Sub(4), options));
    sub2 = register_module("sub2", FullyShardedDataParallel<Sub>(Sub(4), options));
    shift = register_parameter("shift", torch::full({4}, 0.5));
  }
  at::Tensor forward(const at::Tensor& x) { return sub2(sub1(x + shift)) + shift; }
  FullyShardedDataParallel<Sub> sub1{nullptr}, sub2{nullptr};
  at::Tensor shift;
};
TORCH_MODULE(WrappedMod);

/// The results of one way to shard.
struct Outcome {
  std::vector<std::string> units;
  std::vector<std::string> parameters;  // of the flat parameters, with offsets
  std::vector<std::string> keys;
  std::vector<std::string> order;
  std::vector<at::Tensor> gradients;
};

template <class Model>
Outcome run(Model& model) {
  Outcome outcome;
  const at::Tensor x = torch::linspace(0, 1, 8).reshape({2, 4});
  for (int step = 0; step < 3; ++step) forward(model, x).sum().backward();
  for (const auto& [fqn, module] : fsdp_modules(*model)) outcome.units.push_back(fqn);
  for (const FlatParameterInfo& info : handles(*model)) {
    for (const auto& parameter : info.parameters) {
      outcome.parameters.push_back(info.module_fqn + ":" + parameter.fqn + "@" +
                                   std::to_string(parameter.offset));
    }
  }
  for (const auto& parameter : model->named_parameters()) {
    outcome.keys.push_back(parameter.key());
    outcome.gradients.push_back(parameter.value().grad());
  }
  outcome.order = recorded_order(*model);
  return outcome;
}

// Shows B2, B3, B4.
TEST(FourWaysTest, AllLeadToTheSameUnitsAndTheSameOrder) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    const FullyShardOptions by_hand{.mesh = mesh};
    const FullyShardOptions by_policy{.mesh = mesh, .policy = ModuleWrapPolicy<Sub>()};
    std::vector<Outcome> outcomes;
    const auto seeded_model = [&](const auto& make) {
      std::invoke_result_t<decltype(make)> model{nullptr};
      test::with_generator([&] {
        torch::manual_seed(9);
        model = make();
      });
      return model;
    };
    auto composable_by_hand = seeded_model([] { return Mod(); });
    fully_shard(*composable_by_hand->sub1, by_hand);
    fully_shard(*composable_by_hand->sub2, by_hand);
    fully_shard(*composable_by_hand, by_hand);
    outcomes.push_back(run(composable_by_hand));

    auto composable_by_policy = seeded_model([] { return Mod(); });
    fully_shard(*composable_by_policy, by_policy);
    outcomes.push_back(run(composable_by_policy));

    auto wrapper_by_hand = seeded_model(
        [&] { return FullyShardedDataParallel<WrappedMod>(WrappedMod(by_hand), by_hand); });
    outcomes.push_back(run(wrapper_by_hand));

    auto wrapper_by_policy =
        seeded_model([&] { return FullyShardedDataParallel<Mod>(Mod(), by_policy); });
    outcomes.push_back(run(wrapper_by_policy));

    EXPECT_THAT(outcomes[0].units, ElementsAre("", "sub1", "sub2"));
    EXPECT_THAT(
        outcomes[0].parameters,
        ElementsAre(":shift@0", "sub1:scale@0", "sub1:subsub1.weight@4", "sub1:subsub1.bias@16",
                    "sub1:subsub2.weight@20", "sub1:subsub2.bias@32", "sub2:scale@0",
                    "sub2:subsub1.weight@4", "sub2:subsub1.bias@16", "sub2:subsub2.weight@20",
                    "sub2:subsub2.bias@32"));
    // Only additions use the root's one parameter, and their backward reads no values. So the root
    // is not gathered again in the backward. (PyTorch's FSDP keeps the root gathered.)
    EXPECT_THAT(outcomes[0].order,
                ElementsAre("unshard the root", "unshard sub1", "unshard sub2", "unshard sub2",
                            "unshard sub1", "reduce sub2", "reduce sub1", "reduce the root"));
    for (const Outcome& outcome : outcomes) {
      EXPECT_EQ(outcome.units, outcomes[0].units);
      EXPECT_EQ(outcome.parameters, outcomes[0].parameters);
      EXPECT_EQ(outcome.keys, outcomes[0].keys);
      EXPECT_EQ(outcome.order, outcomes[0].order);
      for (std::size_t i = 0; i < outcome.gradients.size(); ++i) {
        EXPECT_TRUE(outcome.gradients[i].equal(outcomes[0].gradients[i])) << outcome.keys[i];
      }
    }
  });
}

// Shows B3.
TEST(FourWaysTest, HandlesOfNestedUnitsAreInTheOrderOfTheTree) {
  // mod, submod1, submod2, subsubmod of PyTorch's pull request 91044.
  struct ThreeImpl : torch::nn::Module {
    ThreeImpl() {
      submod1 = register_module("submod1", torch::nn::Linear(2, 2));
      submod2 = register_module("submod2", torch::nn::Sequential());
      submod2->push_back("subsubmod", torch::nn::Linear(2, 2));
      submod2->push_back("other", torch::nn::Linear(2, 2));
      weight = register_parameter("weight", torch::ones({2}));
    }
    torch::nn::Linear submod1{nullptr};
    torch::nn::Sequential submod2{nullptr};
    at::Tensor weight;
  };
  const auto model = std::make_shared<ThreeImpl>();
  fully_shard(*model->submod2[0]);
  fully_shard(*model->submod2);
  fully_shard(*model->submod1);
  fully_shard(*model);
  std::vector<std::string> names;
  for (const FlatParameterInfo& info : handles(*model)) names.push_back(info.module_fqn);
  EXPECT_THAT(names, ElementsAre("", "submod1", "submod2", "submod2.subsubmod"));
}

// Shows B5.
TEST(FourWaysTest, OnlyTheOutermostOfSeveralUsersGathers) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mod model;
    fully_shard(*model, {.mesh = mesh});  // one unit, used by five modules
    for (int step = 0; step < 2; ++step) {
      forward(model, torch::ones({2, 4})).sum().backward();
      EXPECT_THAT(recorded_order(*model), ElementsAre("unshard the root", "reduce the root"));
    }
  });
}

// Shows B4.
TEST(FourWaysTest, BothWaysRaiseTheSameErrors) {
  const std::vector<std::string> errors = {
      test::error_of([] {
        Sub module(4);
        fully_shard(*module);
        fully_shard(*module);
      }),
      test::error_of([] {
        Sub module(4);
        const FullyShardedDataParallel<Sub> once(module, FullyShardOptions{});
        const FullyShardedDataParallel<Sub> twice(module, FullyShardOptions{});
      })};
  EXPECT_THAT(errors[0], HasSubstr("expected a module that is not sharded or replicated yet"));
  EXPECT_EQ(errors[0], errors[1]);
}

TEST(FourWaysTest, AWrapperIsARootByItself) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    FullyShardedDataParallel<Sub> module(Sub(4), {.mesh = mesh});
    module(torch::ones({2, 4})).sum().backward();
    EXPECT_TRUE(module->scale.grad().defined());
    EXPECT_FALSE(is_in_pass(*module));
    const auto other = std::make_shared<SubImpl>(4);
    const FullyShardedDataParallel<SubImpl> by_class(other, {.mesh = mesh});
    EXPECT_EQ(by_class.ptr(), other);
  });
}

}  // namespace
}  // namespace tessera
