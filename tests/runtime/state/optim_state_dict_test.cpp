#include <gmock/gmock.h>
#include <torch/torch.h>

#include "runtime/state/configurations.h"
#include "runtime/state/optimizers.h"
#include "support/temporary_directory.h"

namespace tessera {
namespace {

using test::Configuration;
using test::error_of;
using test::make_optimizer;
using test::OptimizerKind;
using test::seeded;
using test::some_ids;
using test::Transformer;
using test::unique_parameters;
using ::testing::HasSubstr;

/// Trains two steps, by default. All ranks use the same batch, so averages equal one rank's values.
template <class Step>
void train(torch::optim::Optimizer& optimizer, Step&& loss, int num_steps = 2) {
  for (int step = 0; step < num_steps; ++step) {
    optimizer.zero_grad();
    loss().backward();
    optimizer.step();
  }
}

/// Compares all entries of two state dicts of type FULL.
void expect_equal(const StateDict& found, const StateDict& expected, double tolerance = 0) {
  EXPECT_EQ(found.size(), expected.size());
  for (const StateDict::Item& item : expected) {
    ASSERT_TRUE(found.contains(item.fqn)) << item.fqn;
    if (const auto* value = std::get_if<Value>(&item.entry)) {
      EXPECT_EQ(std::get<Value>(*found.find(item.fqn)), *value) << item.fqn;
      continue;
    }
    const at::Tensor a = found.tensor(item.fqn);
    const at::Tensor b = expected.tensor(item.fqn);
    EXPECT_EQ(a.sizes(), b.sizes()) << item.fqn;
    EXPECT_EQ(a.scalar_type(), b.scalar_type()) << item.fqn;
    EXPECT_TRUE(tolerance == 0 ? a.equal(b) : torch::allclose(a, b, tolerance, tolerance))
        << item.fqn;
  }
}

class OptimStateDictTest
    : public ::testing::TestWithParam<std::tuple<OptimizerKind, Configuration>> {};

// Shows C7.
TEST_P(OptimStateDictTest, FullIsThatOfTheUnshardedRunAndIsLoadedBack) {
  const auto [kind, configuration] = GetParam();
  test::on_ranks(
      configuration.world_size,
      [&, kind = kind, configuration = configuration](const dist::Mesh& mesh) {
        Transformer unsharded = seeded<Transformer>();
        const auto reference = make_optimizer(kind, unique_parameters(*unsharded));
        train(*reference, [&] { return unsharded->forward(some_ids()).pow(2).mean(); });

        Transformer model = seeded<Transformer>();
        configuration.apply(model, mesh);
        const auto optimizer = make_optimizer(kind, unique_parameters(*model));
        train(*optimizer, [&] { return forward(model, some_ids()).pow(2).mean(); });
        const StateDict found = optim_state_dict(*model, *optimizer);
        expect_equal(found, optim_state_dict(*unsharded, *reference), 1e-4);

        // Loads each type into an optimizer that has not stepped.
        for (const StateDictType type : {FULL, SHARDED, LOCAL}) {
          const StateDict saved = optim_state_dict(*model, *optimizer, {.type = type});
          const auto fresh = make_optimizer(kind, unique_parameters(*model), 0.5);
          load_optim_state_dict(*model, *fresh, saved);
          expect_equal(optim_state_dict(*model, *fresh), found);
        }
        const StateDict of_first = optim_state_dict(*model, *optimizer, {.rank0_only = true});
        EXPECT_EQ(of_first.size(), mesh.rank() == 0 ? found.size() : 0);
        const auto fresh = make_optimizer(kind, unique_parameters(*model), 0.5);
        load_optim_state_dict(*model, *fresh, of_first, {.rank0_only = true});
        expect_equal(optim_state_dict(*model, *fresh), found);
      },
      configuration.mesh_options());
}

INSTANTIATE_TEST_SUITE_P(Configurations, OptimStateDictTest,
                         ::testing::Combine(::testing::ValuesIn(test::kOptimizerKinds),
                                            ::testing::ValuesIn(test::configurations({1, 2, 4}))),
                         [](const auto& test) {
                           return test::name_of(std::get<0>(test.param)) + "_" +
                                  std::get<1>(test.param).name();
                         });

// Shows C8.
TEST(OptimStateDictFormTest, NamesAndFormsArePythons) {
  test::Mlp model = seeded<test::Mlp>();
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.25));
  train(
      optimizer,
      [&] {
        return model->forward(torch::ones({2, 7})).sum();
      },
      3);
  const StateDict found = optim_state_dict(*model, optimizer);
  const at::Tensor step = found.tensor("state.up.weight.step");
  EXPECT_EQ(step.dim(), 0);
  EXPECT_EQ(step.scalar_type(), at::kFloat);
  EXPECT_EQ(step.item<float>(), 3);
  const auto value = [&](const std::string& name) {
    return std::get<Value>(*found.find("param_groups.0." + name));
  };
  EXPECT_EQ(value("lr"), Value(0.25));
  EXPECT_EQ(value("betas"), Value(Value::Tuple{{0.9, 0.999}}));
  EXPECT_EQ(value("decoupled_weight_decay"), Value(true));
  for (const char* name : {"maximize", "capturable", "differentiable", "amsgrad"}) {
    EXPECT_EQ(value(name), Value(false)) << name;
  }
  for (const char* name : {"foreach", "fused"}) EXPECT_EQ(value(name), Value()) << name;
  EXPECT_EQ(value("params"), Value(Value::List{"up.weight", "up.bias", "middle.weight",
                                               "middle.bias", "down.weight", "down.bias"}));
  for (const StateDict::Item& item : found) {
    EXPECT_EQ(formats::spell(item.key_path), item.fqn);
    const auto* tensor = std::get_if<StateTensor>(&item.entry);
    if (tensor == nullptr) continue;
    EXPECT_EQ(tensor->kind, item.fqn.ends_with(".step") ? formats::StateKind::scalar_parameter
                                                        : formats::StateKind::pointwise);
    EXPECT_TRUE(item.fqn.starts_with("state." + tensor->parameter + "."));
  }
}

// Shows C8.
TEST(OptimStateDictFormTest, FieldsThatNobodyKnowsAreCarriedThrough) {
  test::Mlp model;
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.1));
  StateDict saved = optim_state_dict(*model, optimizer);
  saved.set("param_groups.0.initial_lr", Value(0.75));
  saved.set("param_groups.0.foreach", Value(false));
  saved.set("param_groups.0.lr", Value(std::int64_t{1}));
  load_optim_state_dict(*model, optimizer, saved);
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 1.0);
  const StateDict after = optim_state_dict(*model, optimizer);
  EXPECT_EQ(std::get<Value>(*after.find("param_groups.0.initial_lr")), Value(0.75));
  EXPECT_EQ(std::get<Value>(*after.find("param_groups.0.foreach")), Value(false));
}

// Shows C8.
TEST(OptimStateDictFormTest, AStepThatFloat32WouldRoundIsKept) {
  torch::nn::Linear model(2, 2);
  torch::optim::Adam optimizer(model->parameters(), torch::optim::AdamOptions(0.1));
  train(optimizer, [&] { return model->forward(torch::ones({1, 2})).sum(); });
  auto& state = optimizer.state()[model->weight.unsafeGetTensorImpl()];
  static_cast<torch::optim::AdamParamState&>(*state).step((1 << 24) + 1);
  const StateDict saved = optim_state_dict(*model, optimizer);
  static_cast<torch::optim::AdamParamState&>(*state).step(1);
  load_optim_state_dict(*model, optimizer, saved);
  auto& loaded = optimizer.state()[model->weight.unsafeGetTensorImpl()];
  EXPECT_EQ(static_cast<torch::optim::AdamParamState&>(*loaded).step(), (1 << 24) + 1);
}

// Shows C8.
TEST(OptimStateDictFormTest, ParametersWithoutStateAndFrozenOnes) {
  test::Mlp model = seeded<test::Mlp>();
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.1));
  train(optimizer, [&] { return model->up->forward(torch::ones({2, 7})).sum(); });
  model->up->weight.requires_grad_(false);
  const StateDict found = optim_state_dict(*model, optimizer);
  EXPECT_TRUE(found.contains("state.up.weight.exp_avg"));
  EXPECT_FALSE(found.contains("state.down.weight.exp_avg"));
  torch::optim::AdamW fresh(model->parameters(), torch::optim::AdamWOptions(0.1));
  train(fresh, [&] { return model->forward(torch::ones({2, 7})).sum(); });
  load_optim_state_dict(*model, fresh, found);
  expect_equal(optim_state_dict(*model, fresh), found);  // state of other parameters is removed
}

// Shows C7.
TEST(OptimStateDictFormTest, KeysByNumberAndBack) {
  test::Mlp model = seeded<test::Mlp>();
  const auto optimizer = make_optimizer(OptimizerKind::adamw_two_groups, model->parameters());
  train(*optimizer, [&] { return model->forward(torch::ones({2, 7})).sum(); });
  const StateDict by_name = optim_state_dict(*model, *optimizer);
  const StateDict by_id =
      rekey_optim_state_dict(by_name, OptimStateKey::param_id, *model, *optimizer);
  // Groups: up.weight, middle.bias | up.bias, middle.weight, down.weight, down.bias
  EXPECT_TRUE(by_id.tensor("state.1.exp_avg").equal(by_name.tensor("state.middle.bias.exp_avg")));
  EXPECT_EQ(std::get<Value>(*by_id.find("param_groups.1.params")), Value(Value::List{2, 3, 4, 5}));
  for (const StateDict::Item& item : by_id) {  // numbers are dict keys, not list positions
    if (!item.fqn.starts_with("state.")) continue;
    ASSERT_EQ(item.key_path.size(), 3) << item.fqn;
    EXPECT_TRUE(std::holds_alternative<formats::NonStringKey>(item.key_path[1])) << item.fqn;
  }
  expect_equal(rekey_optim_state_dict(by_id, OptimStateKey::param_name, *model, *optimizer),
               by_name);
  EXPECT_THAT(
      error_of([&] { rekey_optim_state_dict(by_id, OptimStateKey::param_id, *model, *optimizer); }),
      HasSubstr("the name of a parameter"));
  // Groups of the flattened form would keep their names beside numbered state.
  EXPECT_THAT(error_of([&] {
                rekey_optim_state_dict(flatten_optim_state_dict(by_name), OptimStateKey::param_id,
                                       *model, *optimizer);
              }),
              HasSubstr("was flatten_optim_state_dict called before? call it afterwards"));
}

// Shows C7.
TEST(OptimStateDictFormTest, FlattenedGroupsAreToldForEachParameter) {
  torch::nn::Sequential model(torch::nn::Linear(3, 4), torch::nn::Linear(4, 2));
  const auto optimizer = make_optimizer(OptimizerKind::adamw_two_groups, model->parameters());
  train(*optimizer, [&] { return model->forward(torch::ones({2, 3})).sum(); });
  const StateDict nested = optim_state_dict(*model, *optimizer);
  const StateDict flattened = flatten_optim_state_dict(nested);
  for (const StateDict::Item& item : flattened) {
    EXPECT_EQ(item.key_path, formats::KeyPath{item.fqn});
    EXPECT_FALSE(item.fqn.ends_with(".params"));
  }
  for (const int group : {0, 1}) {
    const std::string prefix = "param_groups." + std::to_string(group) + ".";
    const auto names = std::get<Value>(*nested.find(prefix + "params"));
    for (const Value& name : *names.get_if<Value::List>()) {
      const std::string own = "param_groups." + *name.get_if<std::string>() + ".";
      for (const std::string field : {"lr", "betas", "weight_decay", "maximize"}) {
        EXPECT_EQ(std::get<Value>(*flattened.find(own + field)),
                  std::get<Value>(*nested.find(prefix + field)));
      }
    }
  }
  StateDict bare;  // without key paths, as a user may build one
  for (const StateDict::Item& item : flattened) bare.set(item.fqn, item.entry);
  for (const StateDict* saved : {&flattened, &std::as_const(bare)}) {
    const auto fresh = make_optimizer(OptimizerKind::adamw_two_groups, model->parameters(), 0.5);
    load_optim_state_dict(*model, *fresh, *saved);
    expect_equal(optim_state_dict(*model, *fresh), nested);
  }
  StateDict other = flattened;
  other.set("param_groups.0.weight.lr", Value(0.75));
  torch::optim::AdamW one(model->parameters(), torch::optim::AdamWOptions(0.1));
  EXPECT_THAT(error_of([&] { load_optim_state_dict(*model, one, other); }),
              HasSubstr("in the saved groups"));
  other.erase("param_groups.0.weight.lr");
  const StateDict by_id =
      rekey_optim_state_dict(nested, OptimStateKey::param_id, *model, *optimizer);
  EXPECT_THAT(error_of([&] { flatten_optim_state_dict(by_id); }), HasSubstr("rekey"));
  StateDict no_list = nested;
  no_list.set("param_groups.0.params", Value(0.75));
  EXPECT_THAT(error_of([&] { flatten_optim_state_dict(no_list); }),
              HasSubstr("found an entry that is not a list"));
  no_list.erase("param_groups.0.params");
  EXPECT_THAT(error_of([&] { flatten_optim_state_dict(no_list); }), HasSubstr("found none"));
}

// Shows C7.
TEST(OptimStateDictFaultTest, WhatRank0HasThatDoesNotFitIsNamedOnAllRanks) {
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    test::Mlp model = seeded<test::Mlp>();
    fully_shard(*model, {.mesh = mesh});
    const auto optimizer = make_optimizer(OptimizerKind::adamw_two_groups, model->parameters());
    train(*optimizer, [&] { return forward(model, torch::ones({2, 7})).sum(); });
    StateDict saved = optim_state_dict(*model, *optimizer, {.rank0_only = true});
    if (mesh.rank() == 0) {
      saved.set("state.up.bias.exp_avg", StateTensor::whole(torch::ones({2})));
    }
    EXPECT_THAT(
        error_of([&] { load_optim_state_dict(*model, *optimizer, saved, {.rank0_only = true}); }),
        HasSubstr("state.up.bias.exp_avg: shape"));
  });
}

// Shows C7.
TEST(OptimStateDictFaultTest, WhatDoesNotFitIsNamed) {
  test::Mlp model = seeded<test::Mlp>();
  torch::optim::LBFGS lbfgs(model->parameters(), torch::optim::LBFGSOptions(0.1));
  EXPECT_THAT(error_of([&] { optim_state_dict(*model, lbfgs); }), HasSubstr("LBFGS"));

  torch::optim::Adam foreign(test::seeded<test::Mlp>()->parameters(),
                             torch::optim::AdamOptions(0.1));
  EXPECT_THAT(error_of([&] { optim_state_dict(*model, foreign); }),
              HasSubstr("parameter 0 of the optimizer's group 0"));

  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.1));
  train(optimizer, [&] { return model->forward(torch::ones({2, 7})).sum(); });
  const StateDict good = optim_state_dict(*model, optimizer);
  StateDict wrong = good;
  wrong.erase("state.up.weight.exp_avg_sq");
  wrong.set("state.up.bias.exp_avg", StateTensor::whole(torch::ones({2})));
  wrong.set("state.up.bias.other", StateTensor::whole(torch::ones({2})));
  const std::string error = error_of([&] { load_optim_state_dict(*model, optimizer, wrong); });
  EXPECT_THAT(error, HasSubstr("3 problems"));
  EXPECT_THAT(error, HasSubstr("state.up.weight.exp_avg_sq: missing"));
  EXPECT_THAT(error, HasSubstr("state.up.bias.exp_avg: shape"));
  EXPECT_THAT(error, HasSubstr("state.up.bias.other: unexpected"));
  expect_equal(optim_state_dict(*model, optimizer), good);

  wrong = good;
  wrong.set("param_groups.0.maximize", Value(true));
  EXPECT_THAT(error_of([&] { load_optim_state_dict(*model, optimizer, wrong); }),
              HasSubstr("maximize"));
  torch::optim::Adam adam(model->parameters(), torch::optim::AdamOptions(0.1));
  EXPECT_THAT(error_of([&] { load_optim_state_dict(*model, adam, good); }),
              HasSubstr("decoupled_weight_decay"));
  wrong = good;
  wrong.set("param_groups.0.lr", Value("fast"));
  EXPECT_THAT(error_of([&] { load_optim_state_dict(*model, adam, wrong); }), HasSubstr("lr"));
}

// Shows C7.
TEST(OptimStateDictFaultTest, NumbersThatACastWouldMakeInfiniteAreRefused) {
  torch::nn::Linear model(2, 1);
  model->to(at::kHalf);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  train(optimizer, [&] { return model->forward(torch::ones({1, 2}, at::kHalf)).sum(); });
  const StateDict good = optim_state_dict(*model, optimizer);
  StateDict large = good;
  large.set("state.bias.momentum_buffer", StateTensor::whole(torch::tensor({70000.0})));
  EXPECT_THAT(
      error_of([&] { load_optim_state_dict(*model, optimizer, large, {.allow_cast = true}); }),
      HasSubstr("state.bias.momentum_buffer: cast: expected numbers that float16 can hold, found "
                "1 element that is too large for it"));
  expect_equal(optim_state_dict(*model, optimizer), good);
}

/// An Adam with state of its own, which Tessera does not know.
struct AdamWithMore : torch::optim::Adam {
  using torch::optim::Adam::Adam;
  at::Tensor average = torch::zeros({3});
};

// Shows C7.
TEST(OptimStateDictFaultTest, AClassDerivedFromAnOptimizerIsRefused) {
  test::Mlp model = seeded<test::Mlp>();
  AdamWithMore optimizer(parameters(*model), torch::optim::AdamOptions(0.1));
  torch::optim::Adam plain(parameters(*model), torch::optim::AdamOptions(0.1));
  const StateDict good = optim_state_dict(*model, plain);
  for (const std::string& error :
       {error_of([&] { TrainState(model, optimizer); }),
        error_of([&] { optim_state_dict(*model, optimizer); }),
        error_of([&] { load_optim_state_dict(*model, optimizer, good); })}) {
    EXPECT_THAT(error, HasSubstr("AdamWithMore, a class derived from one of them"));
    EXPECT_THAT(error, HasSubstr("make torch's optimizer a member of the class"));
  }
}

// Shows C7.
TEST(OptimStateDictFaultTest, AParameterHeldTwiceIsRefusedByName) {
  test::Transformer model = seeded<test::Transformer>();
  torch::optim::Adam once(parameters(*model), torch::optim::AdamOptions(0.1));
  const StateDict good = optim_state_dict(*model, once);
  torch::optim::Adam in_one_group(model->parameters(), torch::optim::AdamOptions(0.1));
  torch::optim::Adam in_two_groups(
      std::vector<torch::optim::OptimizerParamGroup>{parameters(*model), {{model->head->weight}}},
      torch::optim::AdamOptions(0.1));
  for (const auto& [optimizer, where] :
       {std::pair{&in_one_group, "two entries in group 0"},
        std::pair{&in_two_groups, "entries in group 0 and in group 1"}}) {
    const auto expect_refused = [&, expected = std::string(where)](const auto& action) {
      const std::string error = error_of(action);
      EXPECT_THAT(
          error,
          HasSubstr("embedding.weight: parameter of the optimizer: expected one entry, found " +
                    expected));
      EXPECT_THAT(error, HasSubstr("tessera::parameters(model) lists it once"));
    };
    expect_refused([&] { optim_state_dict(*model, *optimizer); });
    expect_refused([&] { load_optim_state_dict(*model, *optimizer, good); });
    expect_refused(
        [&] { rekey_optim_state_dict(good, OptimStateKey::param_id, *model, *optimizer); });
    expect_refused([&] { TrainState(model, *optimizer); });
  }
  // A group that is added later.
  TrainState state(model, once);
  once.add_param_group({{model->head->weight}});
  const test::TemporaryDirectory directory;
  EXPECT_THAT(error_of([&] { save(state, directory.path() + "/a"); }),
              HasSubstr("embedding.weight: parameter of the optimizer"));
}

// Shows C7.
TEST(OptimStateDictFaultTest, ParametersOfOneGroupMustBeInOne) {
  test::Mlp model = seeded<test::Mlp>();
  const auto two = make_optimizer(OptimizerKind::adamw_two_groups, model->parameters());
  torch::optim::AdamW one(model->parameters(), torch::optim::AdamWOptions(0.1));
  EXPECT_THAT(error_of([&] { load_optim_state_dict(*model, one, optim_state_dict(*model, *two)); }),
              HasSubstr("in the saved groups 0 and 1"));
}

// Shows C7.
TEST(LoadOptimStateDictTest, WhatOneRankRefusesIsLoadedOnNoneWithRank0Only) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    test::Mlp model = seeded<test::Mlp>();
    fully_shard(*model, {.mesh = mesh});
    std::vector<at::Tensor> parameters = {model->up->weight};
    torch::optim::SGD saved(parameters, torch::optim::SGDOptions(0.5));
    const StateDict state = optim_state_dict(*model, saved, {.rank0_only = true});
    if (mesh.rank() == 1) parameters.push_back(model->up->bias);
    torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.1));
    EXPECT_THAT(test::error_of(
                    [&] { load_optim_state_dict(*model, optimizer, state, {.rank0_only = true}); }),
                ::testing::AllOf(HasSubstr("rank 1"), HasSubstr("up.bias: missing")));
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.1);
  });
}

}  // namespace
}  // namespace tessera
