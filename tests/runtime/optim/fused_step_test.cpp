#include "tessera/runtime/optim/fused_step.h"

#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <torch/torch.h>

#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "runtime/optim/stepped_optimizers.h"
#include "runtime/state/saved_states.h"
#include "support/temporary_directory.h"

namespace tessera {
namespace {

namespace optim = torch::optim;
using test::Configuration;
using test::error_of;
using test::OptimizerKind;
using test::OptimizerVariant;
using test::SteppedOptimizer;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;

/// Returns the names of the operators that update parameters in `action`: fused kernels, and the
/// operators by which each optimizer's own step does so.
template <class Action>
std::vector<std::string> updates_of(Action&& action) {
  static thread_local std::vector<std::string>* names = nullptr;
  std::vector<std::string> found;
  names = &found;
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        const std::string name = function.name();
        if (name.starts_with("aten::_fused_") || name == "aten::addcdiv_" || name == "aten::add_") {
          names->push_back(name);
        }
        return nullptr;
      }));
  action();
  at::removeCallback(handle);
  return found;
}

std::vector<at::Tensor> two_parameters() {
  return {torch::ones({3}, torch::requires_grad()), torch::ones({2, 2}, torch::requires_grad())};
}
void set_ones_as_gradients(const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& each : parameters) each.mutable_grad() = torch::ones_like(each);
}

class FusedStepOfTest : public ::testing::TestWithParam<OptimizerVariant> {};

// Shows B23.
TEST_P(FusedStepOfTest, EqualsTheOptimizersOwnStep) {
  test::expect_fused_steps_equal_own(GetParam(), at::kFloat, at::kCPU, 20, 2e-5);
  test::expect_fused_steps_equal_own(GetParam(), at::kDouble, at::kCPU, 20, 1e-12);
}

// Kernels round once where the optimizer's own step rounds after each operator.
TEST_P(FusedStepOfTest, IsCloseToTheOptimizersOwnInHalfPrecision) {
  test::expect_fused_steps_equal_own(GetParam(), at::kBFloat16, at::kCPU, 4, 0.03);
  test::expect_fused_steps_equal_own(GetParam(), at::kHalf, at::kCPU, 4, 0.01);
}

TEST_P(FusedStepOfTest, ASavedOptimizerGoesOn) {
  SteppedOptimizer own(GetParam(), at::kFloat, at::kCPU);
  SteppedOptimizer saved(GetParam(), at::kFloat, at::kCPU);
  for (int step = 0; step < 3; ++step) {
    own.set_gradients(step);
    saved.set_gradients(step);
    own.optimizer->step();
    fused_step(*saved.optimizer);
  }
  std::stringstream file;
  torch::save(*saved.optimizer, file);
  SteppedOptimizer loaded(GetParam(), at::kFloat, at::kCPU);
  torch::load(*loaded.optimizer, file);
  for (std::size_t i = 0; i < saved.parameters.size(); ++i) {
    loaded.parameters[i].detach().copy_(saved.parameters[i].detach());
  }
  own.set_gradients(3);
  loaded.set_gradients(3);
  own.optimizer->step();
  fused_step(*loaded.optimizer);
  test::expect_equal_progress(own, loaded, 2e-5);
}

// All optimizers but SGD tell autograd that they have changed the parameter.
TEST_P(FusedStepOfTest, ABackwardThatNeedsTheOldValuesIsRefusedAsAfterTheOptimizersOwnStep) {
  const auto error_after = [](const auto& step) {
    SteppedOptimizer each(GetParam(), at::kFloat, at::kCPU);
    each.set_gradients(0);
    const at::Tensor loss = each.parameters[0].square().sum();
    step(*each.optimizer);
    return error_of([&] { loss.backward(); });
  };
  const bool is_refused = error_after([](auto& optimizer) { optimizer.step(); }) != "none";
  EXPECT_EQ(is_refused, !GetParam().is_sgd);
  EXPECT_EQ(error_after([](auto& optimizer) { fused_step(optimizer); }) != "none", is_refused);
}

INSTANTIATE_TEST_SUITE_P(Optimizers, FusedStepOfTest,
                         ::testing::ValuesIn(test::optimizer_variants()),
                         [](const auto& each) { return each.param.name; });

TEST(FusedStepTest, OneKernelUpdatesAllParametersOfADtype) {
  std::vector<at::Tensor> parameters = two_parameters();
  parameters.push_back(torch::ones({3}, torch::requires_grad().dtype(at::kDouble)));
  parameters.push_back(torch::ones({1, 3}, torch::requires_grad()));
  set_ones_as_gradients(parameters);
  // The stride of a dimension of size 1 has no meaning.
  parameters.back().mutable_grad() = torch::empty_strided({1, 3}, {7, 1}).fill_(1);
  optim::SGD sgd(parameters, 0.1);
  optim::Adam adam(parameters);
  optim::AdamW adamw(parameters);
  optim::Adagrad adagrad(parameters);
  const std::vector<std::pair<optim::Optimizer*, std::string>> all = {
      {&sgd, "aten::_fused_sgd_"},
      {&adam, "aten::_fused_adam_"},
      {&adamw, "aten::_fused_adamw_"},
      {&adagrad, "aten::_fused_adagrad_"}};
  for (const auto& [optimizer, kernel] : all) {
    for (int step = 0; step < 2; ++step) {
      EXPECT_THAT(updates_of([&] { fused_step(*optimizer); }), ElementsAre(kernel, kernel));
    }
  }
}

TEST(FusedStepTest, ComplexParametersGetTheOptimizersOwnStep) {
  const at::Tensor a = torch::ones({2}, torch::requires_grad().dtype(at::kComplexFloat));
  const at::Tensor b = a.detach().clone().requires_grad_();
  optim::SGD expected({a}, optim::SGDOptions(0.1).momentum(0.9));
  optim::SGD found({b}, optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 3; ++step) {
    set_ones_as_gradients({a, b});
    expected.step();
    EXPECT_THAT(updates_of([&] { fused_step(found); }), Each("aten::add_"));
    EXPECT_TRUE(a.equal(b));
  }
}

TEST(FusedStepTest, ANegatedGradientGetsTheOptimizersOwnStep) {
  const auto parameters = two_parameters();
  set_ones_as_gradients(parameters);
  parameters[0].mutable_grad() = torch::_neg_view(torch::ones({3}));
  optim::SGD optimizer(parameters, 0.5);
  fused_step(optimizer);
  EXPECT_TRUE(parameters[0].eq(1.5).all().item<bool>()) << parameters[0];
  EXPECT_TRUE(parameters[1].eq(0.5).all().item<bool>()) << parameters[1];
}

// A kernel reads elements in the order of memory.
TEST(FusedStepTest, StateInAnotherOrderInMemoryGetsTheOptimizersOwnStep) {
  const auto make = [] {
    at::Tensor parameter = torch::ones({2, 3}, torch::requires_grad());
    parameter.mutable_grad() = torch::arange(6, at::kFloat).reshape({2, 3});
    auto optimizer = std::make_unique<optim::Adam>(std::vector{parameter}, 0.1);
    optimizer->step();
    at::Tensor& moment =
        static_cast<optim::AdamParamState&>(*optimizer->state().begin()->second).exp_avg();
    moment = moment.t().contiguous().t();
    return std::pair(parameter, std::move(optimizer));
  };
  const auto [a, expected] = make();
  const auto [b, found] = make();
  expected->step();
  fused_step(*found);
  EXPECT_TRUE(a.equal(b)) << b;
}

TEST(FusedStepTest, SparseGradientsAreTakenWhereTheOptimizerTakesThem) {
  for (const bool is_adagrad : {false, true}) {
    const auto make = [&](std::vector<at::Tensor> parameters) -> std::unique_ptr<optim::Optimizer> {
      if (is_adagrad) return std::make_unique<optim::Adagrad>(parameters, 0.1);
      return std::make_unique<optim::SGD>(parameters, 0.1);
    };
    const auto a = two_parameters();
    const auto b = two_parameters();
    const auto expected = make(a);
    const auto found = make(b);
    for (const auto& parameters : {a, b}) {
      set_ones_as_gradients(parameters);
      parameters[0].mutable_grad() = torch::tensor({0.0F, 2.0F, 0.0F}).to_sparse();
    }
    expected->step();
    EXPECT_THAT(updates_of([&] { fused_step(*found); }), Contains(StartsWith("aten::_fused_")))
        << "for the other parameter";
    EXPECT_TRUE(a[0].allclose(b[0])) << b[0];
    EXPECT_TRUE(a[1].allclose(b[1])) << b[1];
    EXPECT_FALSE(b[0].equal(torch::ones({3})));
  }
}

TEST(FusedStepTest, ARefusedGradientChangesNothing) {
  const auto parameters = two_parameters();
  set_ones_as_gradients(parameters);
  parameters[1].mutable_grad() = torch::ones({2, 2}).to_sparse();
  optim::AdamW optimizer(parameters, 0.1);
  EXPECT_THAT(error_of([&] { fused_step(optimizer); }), HasSubstr("sparse"));
  EXPECT_TRUE(parameters[0].equal(torch::ones({3})));
  EXPECT_THAT(optimizer.state(), IsEmpty());
  EXPECT_TRUE(optimizer.param_groups()[0].params()[0].is_same(parameters[0])) << "it holds all";
  EXPECT_EQ(optimizer.param_groups()[0].params().size(), 2);
}

TEST(FusedStepTest, StateThatAnOptionNeedsIsRefusedAsByTheOptimizer) {
  const auto parameters = two_parameters();
  set_ones_as_gradients(parameters);
  optim::Adam optimizer(parameters, 0.1);
  fused_step(optimizer);
  static_cast<optim::AdamOptions&>(optimizer.param_groups()[0].options()).amsgrad(true);
  const at::Tensor before = parameters[0].detach().clone();
  EXPECT_NE(error_of([&] { fused_step(optimizer); }), "none");
  EXPECT_TRUE(parameters[0].equal(before));
}

// As optim_state_dict does: `step()` would update it twice.
TEST(FusedStepTest, AParameterThatIsHeldTwiceIsRefused) {
  const auto parameters = two_parameters();
  set_ones_as_gradients(parameters);
  optim::AdamW same_group({parameters[0], parameters[1], parameters[0]}, 0.1);
  EXPECT_THAT(error_of([&] { fused_step(same_group); }),
              AllOf(HasSubstr("expected each parameter once, found parameter 2 of group 0, which "
                              "is also parameter 0 of group 0"),
                    HasSubstr("tessera::parameters(model) lists it once")));
  optim::SGD other_group(std::vector{parameters[0]}, 0.1);
  other_group.add_param_group(optim::OptimizerParamGroup({parameters[1]}));
  // add_param_group refuses a parameter of another group.
  other_group.param_groups()[1].params().push_back(parameters[0]);
  EXPECT_THAT(error_of([&] { fused_step(other_group); }),
              HasSubstr("parameter 1 of group 1, which is also parameter 0 of group 0"));
  EXPECT_TRUE(parameters[0].equal(torch::ones({3})));
  EXPECT_TRUE(parameters[1].equal(torch::ones({2, 2})));
}

struct OwnAdamW : optim::AdamW {
  using AdamW::AdamW;
};

TEST(FusedStepTest, OtherOptimizersAreRefusedByName) {
  optim::RMSprop rmsprop(two_parameters(), 0.1);
  EXPECT_THAT(error_of([&] { fused_step(rmsprop); }),
              AllOf(HasSubstr("expected SGD, Adam, AdamW or Adagrad of torch::optim, found "
                              "torch::optim::RMSprop"),
                    HasSubstr("call its step() instead")));
  OwnAdamW derived(two_parameters(), 0.1);
  EXPECT_THAT(error_of([&] { fused_step(derived); }),
              HasSubstr("OwnAdamW, a class derived from one of them"));
}

// --- shards

constexpr Configuration::Kind kSharded = Configuration::Kind::fully_sharded;
const Configuration kOnTwoRanks[] = {{kSharded, FULL_SHARD, 1, 2},
                                     {kSharded, NO_SHARD, 1, 2},
                                     {Configuration::Kind::replicated, FULL_SHARD, 1, 2}};
constexpr OptimizerKind kFusedKinds[] = {OptimizerKind::sgd_momentum,
                                         OptimizerKind::adamw_two_groups,
                                         OptimizerKind::adam_amsgrad, OptimizerKind::adagrad};
constexpr double kTolerance = 1e-5;

// Shows B23.
TEST(FusedStepTest, ShardsAreTrainedAsByTheOptimizersOwnStep) {
  for (const Configuration& configuration : kOnTwoRanks) {
    for (const OptimizerKind kind : kFusedKinds) {
      const std::string what = configuration.name() + ", " + name_of(kind);
      test::on_ranks(2, [&](const dist::Mesh& mesh) {
        test::Trainer expected(configuration, mesh, kind);
        test::Trainer found(configuration, mesh, kind);
        found.uses_fused_step = true;
        const std::vector<double> losses = expected.train(10);
        EXPECT_THAT(found.train(10),
                    ::testing::Pointwise(::testing::DoubleNear(kTolerance * losses[0]), losses))
            << what;
        const StateDict state = expected.state();
        for (const StateDict::Item& item : found.state()) {
          if (!std::holds_alternative<StateTensor>(item.entry)) continue;
          const at::Tensor tensor = std::get<StateTensor>(item.entry).local_shards.at(0).tensor;
          const at::Tensor whole = state.tensor(item.fqn).reshape(tensor.sizes());
          EXPECT_TRUE(torch::allclose(whole, tensor, 1e-3, 1e-5)) << what << ": " << item.fqn;
        }
        EXPECT_THAT(updates_of([&] { fused_step(*found.optimizer); }),
                    AllOf(SizeIs(found.optimizer->param_groups().size()),
                          Each(StartsWith("aten::_fused_"))))
            << what;
      });
    }
  }
}

// Shows B23.
TEST(FusedStepTest, ARunGoesOnAtAnotherWorldSizeWithEitherStep) {
  const test::TemporaryDirectory directory;
  for (const OptimizerKind kind : kFusedKinds) {
    const std::string path = directory.path() + "/" + name_of(kind);
    test::SavedRun run;
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      test::Trainer trainer({kSharded, FULL_SHARD, 1, 2}, mesh, kind);
      trainer.uses_fused_step = true;
      trainer.train(3);
      TrainState state(trainer.model, *trainer.optimizer);
      save(state, path, {});
      const std::vector<double> losses = trainer.train(5);
      if (mesh.rank() == 0) run.losses = losses;
    });
    for (const bool is_fused : {false, true}) {
      test::on_ranks(3, [&](const dist::Mesh& mesh) {
        test::Trainer trainer({kSharded, SHARD_GRAD_OP, 1, 3}, mesh, kind);
        trainer.uses_fused_step = is_fused;
        TrainState state(trainer.model, *trainer.optimizer);
        load(state, path);
        test::expect_to_go_on_as(run, trainer, kTolerance, path);
      });
    }
  }
}

// A pass is open: parameters are whole, and gradients of the step before are shards.
TEST(FusedStepTest, AStepBetweenForwardAndBackwardIsRefused) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    test::Mlp model = test::sharded_mlp(mesh);
    optim::AdamW optimizer(model->parameters());
    forward(model, test::mlp_input()).sum().backward();
    fused_step(optimizer);
    const at::Tensor loss = forward(model, test::mlp_input()).sum();
    EXPECT_NE(error_of([&] { fused_step(optimizer); }), "none");
  });
}

}  // namespace
}  // namespace tessera
