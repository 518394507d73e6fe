#include <gmock/gmock.h>
#include <torch/torch.h>

#include "runtime/state/configurations.h"

namespace tessera {
namespace {

using test::Block;
using test::Configuration;
using test::error_of;
using test::seeded;
using test::some_ids;
using test::Transformer;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

/// Returns the keys in order; aliases as `key=target`.
std::vector<std::string> keys_of(const StateDict& state_dict) {
  std::vector<std::string> keys;
  for (const StateDict::Item& item : state_dict) {
    const auto* alias = std::get_if<StateAlias>(&item.entry);
    keys.push_back(alias == nullptr ? item.fqn : item.fqn + "=" + alias->target);
  }
  return keys;
}

void expect_equal(const StateDict& found, const StateDict& expected) {
  EXPECT_EQ(keys_of(found), keys_of(expected));
  for (const StateDict::Item& item : expected) {
    EXPECT_TRUE(found.tensor(item.fqn).equal(expected.tensor(item.fqn))) << item.fqn;
  }
}

// PyTorch conjugates only when the numbers are read, but a save reads the memory.
TEST(ConjugatedStateTest, HasItsNumbersInMemory) {
  torch::nn::Module model;
  model.register_buffer("b", torch::complex(torch::ones(2), torch::ones(2)).conj());
  const at::Tensor saved = state_dict(model).tensor("b");
  EXPECT_FALSE(saved.is_conj());
  EXPECT_TRUE(torch::imag(saved).equal(-torch::ones(2)));
}

class StateDictTest : public ::testing::TestWithParam<Configuration> {
 protected:
  static void on_ranks_with(
      const std::function<void(const dist::Mesh&, Transformer&, const StateDict&)>& body) {
    const Configuration configuration = GetParam();
    test::on_ranks(
        configuration.world_size,
        [&](const dist::Mesh& mesh) {
          Transformer unsharded = seeded<Transformer>();
          Transformer model = seeded<Transformer>();
          configuration.apply(model, mesh);
          body(mesh, model, state_dict(*unsharded));
        },
        configuration.mesh_options());
  }
};

// Shows C2.
TEST_P(StateDictTest, FullIsThatOfTheUnshardedModel) {
  on_ranks_with([](const dist::Mesh& mesh, Transformer& model, const StateDict& unsharded) {
    expect_equal(state_dict(*model), unsharded);
    expect_equal(state_dict(*model, {.offload_to_cpu = true}), unsharded);
    const StateDict of_first = state_dict(*model, {.rank0_only = true});
    expect_equal(of_first, mesh.rank() == 0 ? unsharded : StateDict());
  });
}

// Shows C2.
TEST_P(StateDictTest, ShardsCoverEachTensorOnceAndAliasTheParameters) {
  on_ranks_with([](const dist::Mesh& mesh, Transformer& model, const StateDict& unsharded) {
    const StateDict sharded = state_dict(*model, {.type = SHARDED});
    EXPECT_EQ(keys_of(sharded), keys_of(unsharded));
    for (const StateDict::Item& item : sharded) {
      const auto* tensor = std::get_if<StateTensor>(&item.entry);
      if (tensor == nullptr) continue;
      const at::Tensor whole = unsharded.tensor(item.fqn);
      EXPECT_EQ(tensor->shape, Shape(whole.sizes().begin(), whole.sizes().end()));
      std::vector<Region> regions;
      for (const Shard& shard : tensor->layout) regions.push_back(shard.region);
      if (!regions.empty()) {
        EXPECT_TRUE(check_coverage(regions, tensor->shape).empty());
      }
      for (const LocalShard& local : tensor->local_shards) {
        const auto range = as_flat_range(local.region, tensor->shape);
        ASSERT_TRUE(range) << item.fqn;
        EXPECT_TRUE(local.tensor.view({-1}).equal(
            whole.view({-1}).narrow(0, range->begin, range->numel())));
        const bool is_holder =
            tensor->layout.empty() || std::ranges::any_of(tensor->layout, [&](const Shard& shard) {
              return shard.region == local.region &&
                     std::ranges::find(shard.ranks, mesh.rank()) != shard.ranks.end();
            });
        EXPECT_TRUE(is_holder) << item.fqn;
        local.tensor.zero_();
      }
    }
    for (const at::Tensor& parameter : model->parameters()) {
      EXPECT_TRUE(parameter.detach().eq(0).all().item<bool>());
    }
  });
}

// Shows C2.
TEST_P(StateDictTest, EachTypeIsLoadedBack) {
  on_ranks_with([](const dist::Mesh& mesh, Transformer& model, const StateDict& unsharded) {
    for (const StateDictType type : {FULL, SHARDED, LOCAL}) {
      StateDict saved = state_dict(*model, {.type = type});
      for (StateDict::Item& item : saved) {
        auto* tensor = std::get_if<StateTensor>(&item.entry);
        if (tensor == nullptr) continue;
        for (LocalShard& local : tensor->local_shards) local.tensor = local.tensor.clone();
      }
      {
        const at::NoGradGuard no_grad;
        for (at::Tensor& parameter : model->parameters()) parameter.fill_(7);
      }
      load_state_dict(*model, saved);
      expect_equal(state_dict(*model), unsharded);
    }
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : model->parameters()) parameter.fill_(7);
    }
    load_state_dict(*model, mesh.rank() == 0 ? unsharded : StateDict(), {.rank0_only = true});
    expect_equal(state_dict(*model), unsharded);
  });
}

// Shows C1.
TEST_P(StateDictTest, AStateDictOfAPartBeforeTheFirstForwardLeavesTheRootAsItIs) {
  on_ranks_with([](const dist::Mesh& /*mesh*/, Transformer& model, const StateDict& unsharded) {
    const StateDict of_block = state_dict(*model->blocks[2]);
    for (const StateDict::Item& item : of_block) {
      EXPECT_TRUE(of_block.tensor(item.fqn).equal(unsharded.tensor("blocks.2." + item.fqn)));
    }
    forward(model, some_ids()).sum().backward();
    expect_equal(state_dict(*model), unsharded);
  });
}

INSTANTIATE_TEST_SUITE_P(Configurations, StateDictTest,
                         ::testing::ValuesIn(test::configurations({1, 2, 3, 4})),
                         [](const auto& test) { return test.param.name(); });

/// Checks in which order hooks run, with the modules and hooks of PyTorch's pull request 90436.
/// Shows C1.
TEST(StateDictHooksTest, PreHooksRunFromTheRootAndPostHooksFromTheLeaves) {
  test::Mlp model;
  std::vector<std::string> calls;
  const auto note = [&](const std::string& what, const std::string& prefix) {
    calls.push_back(what + " " + (prefix.empty() ? "root" : prefix));
  };
  const auto attach = [&](torch::nn::Module& module) {
    registry::add_state_dict_pre_hook(
        module, [&](torch::nn::Module&, const std::string& prefix, const StateDictOptions&) {
          note("pre", prefix);
        });
    registry::add_load_state_dict_pre_hook(
        module, [&](torch::nn::Module&, StateDict&, const std::string& prefix, LoadReport&) {
          note("load pre", prefix);
        });
    const bool is_root = &module == model.get();
    registry::add_load_state_dict_post_hook(
        module, [&, is_root](torch::nn::Module&) { note("load post", is_root ? "" : "child"); });
    return registry::add_state_dict_post_hook(
        module, [&](torch::nn::Module&, StateDict&, const std::string& prefix,
                    const StateDictOptions&) { note("post", prefix); });
  };
  registry::HookHandle of_root = attach(*model);
  attach(*model->up);
  const StateDict saved = state_dict(*model);
  EXPECT_THAT(calls, ElementsAre("pre root", "pre up.", "post up.", "post root"));
  calls.clear();
  load_state_dict(*model, saved);
  EXPECT_THAT(calls,
              ElementsAre("load pre root", "load pre up.", "load post child", "load post root"));
  calls.clear();
  of_root.remove();
  state_dict(*model);
  EXPECT_THAT(calls, ElementsAre("pre root", "pre up.", "post up."));
}

// A post hook may change the module itself, so a second call could change it twice.
// Shows C1.
TEST(StateDictHooksTest, LoadPostHooksOfAModuleWithTwoNamesRunOnceAndPreHooksForEachName) {
  const auto model = std::make_shared<torch::nn::Module>();
  torch::nn::Linear layer(3, 2);
  model->register_module("first", layer.ptr());
  model->register_module("second", layer.ptr());
  std::vector<std::string> calls;
  registry::add_load_state_dict_pre_hook(
      *layer, [&](torch::nn::Module&, StateDict&, const std::string& prefix, LoadReport&) {
        calls.push_back(prefix);
      });
  registry::add_load_state_dict_post_hook(*layer,
                                          [&](torch::nn::Module&) { calls.push_back("post"); });
  load_state_dict(*model, state_dict(*model));
  EXPECT_THAT(calls, ElementsAre("first.", "second.", "post"));
}

// Shows C1.
TEST(StateDictHooksTest, UsersHooksMeetTensorsOfTheWholeModel) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    test::Mlp model = seeded<test::Mlp>();
    fully_shard(*model, {.mesh = mesh});
    registry::add_state_dict_post_hook(
        *model->up, [](torch::nn::Module&, StateDict& state_dict, const std::string& prefix,
                       const StateDictOptions&) {
          const at::Tensor weight = state_dict.tensor(prefix + "weight");
          EXPECT_EQ(weight.sizes(), at::IntArrayRef({13, 7}));
          state_dict.erase(prefix + "weight");
          state_dict.set(prefix + "transposed", StateTensor::whole(weight.t()));
        });
    registry::add_load_state_dict_pre_hook(*model->up, [](torch::nn::Module&, StateDict& state_dict,
                                                          const std::string& prefix, LoadReport&) {
      const at::Tensor transposed = state_dict.tensor(prefix + "transposed");
      state_dict.erase(prefix + "transposed");
      state_dict.set(prefix + "weight", StateTensor::whole(transposed.t()));
    });
    StateDict saved = state_dict(*model);
    EXPECT_EQ(saved.tensor("up.transposed").sizes(), at::IntArrayRef({7, 13}));
    EXPECT_FALSE(saved.contains("up.weight"));
  });
}

// Shows C1.
TEST(StateDictHooksTest, UsersHooksMayBeAddedBeforeAModuleIsShardedOrAfter) {
  const auto add_hooks = [](torch::nn::Module& layer) {
    registry::add_state_dict_post_hook(layer, [](torch::nn::Module&, StateDict& state_dict,
                                                 const std::string& prefix,
                                                 const StateDictOptions&) {
      const at::Tensor weight = state_dict.tensor(prefix + "weight");
      state_dict.erase(prefix + "weight");
      state_dict.set(prefix + "transposed", StateTensor::whole(weight.t()));
      state_dict.set(prefix + "bias", StateTensor::whole(2 * state_dict.tensor(prefix + "bias")));
    });
    registry::add_load_state_dict_pre_hook(layer, [](torch::nn::Module&, StateDict& state_dict,
                                                     const std::string& prefix, LoadReport&) {
      const at::Tensor transposed = state_dict.tensor(prefix + "transposed");
      state_dict.erase(prefix + "transposed");
      state_dict.set(prefix + "weight", StateTensor::whole(transposed.t()));
      state_dict.set(prefix + "bias", StateTensor::whole(state_dict.tensor(prefix + "bias") / 2));
    });
  };
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    test::Mlp unsharded = seeded<test::Mlp>();
    add_hooks(*unsharded->up);
    const StateDict expected = state_dict(*unsharded);
    for (const bool is_before : {false, true}) {
      test::Mlp model = seeded<test::Mlp>();
      if (is_before) add_hooks(*model->up);
      fully_shard(*model, {.mesh = mesh});
      if (!is_before) add_hooks(*model->up);
      EXPECT_TRUE(state_dict(*model).tensor("up.bias").equal(expected.tensor("up.bias")));
      EXPECT_TRUE(
          state_dict(*model).tensor("up.transposed").equal(expected.tensor("up.transposed")));
      for (at::Tensor& parameter : model->parameters()) parameter.detach().fill_(7);
      load_state_dict(*model, expected);
      EXPECT_TRUE(state_dict(*model).tensor("up.bias").equal(expected.tensor("up.bias")));
      EXPECT_TRUE(
          state_dict(*model).tensor("up.transposed").equal(expected.tensor("up.transposed")));
    }
  });
}

/// Calls `body` with a model on two ranks, once replicated and once sharded.
void with_models_of_two_ranks(const std::function<void(const dist::Mesh&, test::Mlp&)>& body) {
  for (const bool is_sharded : {false, true}) {
    SCOPED_TRACE(is_sharded ? "fully_shard" : "replicate");
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      test::Mlp model = seeded<test::Mlp>();
      if (is_sharded) {
        fully_shard(*model, {.mesh = mesh});
      } else {
        replicate(*model, {.mesh = mesh});
      }
      body(mesh, model);
    });
  }
}

// Shows C1, C2.
TEST(StateDictHooksTest, PostHooksOfUsersRunOnlyOnTheRankThatGetsEntries) {
  with_models_of_two_ranks([](const dist::Mesh& mesh, test::Mlp& model) {
    const StateDict before = state_dict(*model);
    registry::HookHandle hook = registry::add_state_dict_post_hook(
        *model->up, [](torch::nn::Module&, StateDict& state_dict, const std::string& prefix,
                       const StateDictOptions&) {
          const at::Tensor weight = state_dict.tensor(prefix + "weight");
          weight.div_(weight.abs().max().item<double>());
        });
    const StateDict found = state_dict(*model, {.rank0_only = true});
    ASSERT_EQ(found.empty(), mesh.rank() == 1);
    if (!found.empty()) {
      EXPECT_EQ(found.tensor("up.weight").abs().max().item<double>(), 1);
    }
    hook.remove();
    expect_equal(state_dict(*model), before);
  });
}

// Shows C1, C2.
TEST(StateDictHooksTest, PostHooksRunOnAllRanksToUndoWhatPreHooksDid) {
  with_models_of_two_ranks([](const dist::Mesh& mesh, test::Mlp& model) {
    const StateDict before = state_dict(*model);
    registry::HookHandle pre = registry::add_state_dict_pre_hook(
        *model, [](torch::nn::Module& module, const std::string&, const StateDictOptions&) {
          for (at::Tensor& parameter : module.parameters()) parameter.mul_(2);
        });
    registry::HookHandle post = registry::add_state_dict_post_hook(
        *model, [&](torch::nn::Module& module, StateDict& state_dict, const std::string&,
                    const StateDictOptions& options) {
          EXPECT_TRUE(options.rank0_only);
          for (at::Tensor& parameter : module.parameters()) parameter.div_(2);
          for (const StateDict::Item& item : before) {
            EXPECT_TRUE(state_dict.tensor(item.fqn).equal(2 * before.tensor(item.fqn)));
          }
        });
    EXPECT_EQ(state_dict(*model, {.rank0_only = true}).empty(), mesh.rank() == 1);
    pre.remove();
    post.remove();
    expect_equal(state_dict(*model), before);
  });
}

// Shows C2.
TEST(StateDictOptionsTest, ASubtreeMayHaveATypeOfItsOwn) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = test::sharded_transformer(mesh);
    const StateDictTypeScope outer(*model->blocks[0], {.type = FULL, .rank0_only = true});
    std::optional<StateDictTypeScope> inner;
    inner.emplace(*model->blocks[1], StateDictOptions{.type = FULL});
    const StateDict found = state_dict(*model, {.type = SHARDED});
    EXPECT_EQ(found.contains("blocks.0.up.weight"), mesh.rank() == 0);
    EXPECT_TRUE(std::get<StateTensor>(*found.find("blocks.1.up.weight")).layout.empty());
    EXPECT_FALSE(std::get<StateTensor>(*found.find("blocks.2.up.weight")).layout.empty());
    inner.reset();
    const StateDict after = state_dict(*model, {.type = SHARDED});
    EXPECT_FALSE(std::get<StateTensor>(*after.find("blocks.1.up.weight")).layout.empty());
  });
}

// Shows C3.
TEST(StateDictOptionsTest, WrapperAndComposableWayGiveTheSame) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    const FullyShardOptions options{.mesh = mesh};
    test::Mlp by_wrapper = seeded<test::Mlp>();
    FullyShardedDataParallel<torch::nn::Linear> middle(by_wrapper->middle, options);
    FullyShardedDataParallel<test::Mlp> wrapped(by_wrapper, options);
    test::Mlp composed = seeded<test::Mlp>();
    fully_shard(*composed->middle, options);
    fully_shard(*composed, options);
    expect_equal(state_dict(*wrapped), state_dict(*composed));
    for (const StateDictType type : {SHARDED, LOCAL}) {
      const StateDict a = state_dict(*wrapped, {.type = type});
      const StateDict b = state_dict(*composed, {.type = type});
      EXPECT_EQ(keys_of(a), keys_of(b));
      for (const StateDict::Item& item : a) {
        const auto& of_a = std::get<StateTensor>(item.entry);
        const auto& of_b = std::get<StateTensor>(*b.find(item.fqn));
        EXPECT_EQ(of_a.layout, of_b.layout);
        ASSERT_EQ(of_a.local_shards.size(), of_b.local_shards.size());
        for (std::size_t i = 0; i < of_a.local_shards.size(); ++i) {
          EXPECT_EQ(of_a.local_shards[i].region, of_b.local_shards[i].region);
          EXPECT_TRUE(of_a.local_shards[i].tensor.equal(of_b.local_shards[i].tensor));
        }
      }
      EXPECT_EQ(a.units, b.units);
    }
  });
}

// Shows C2.
TEST(StateDictOptionsTest, BuffersThatMixedPrecisionCastAreSavedInTheirOwnDtype) {
  torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
  fully_shard(*model, {.mixed_precision = {.buffer_dtype = at::kBFloat16}});
  EXPECT_EQ(model->named_buffers()["1.running_var"].scalar_type(), at::kBFloat16);
  StateDict saved = state_dict(*model);
  EXPECT_EQ(saved.tensor("1.running_var").scalar_type(), at::kFloat);
  EXPECT_EQ(saved.tensor("1.num_batches_tracked").scalar_type(), at::kLong);
  saved.tensor("1.running_var").fill_(3);
  load_state_dict(*model, saved);
  EXPECT_TRUE(model->named_buffers()["1.running_var"].eq(3).all().item<bool>());
  EXPECT_EQ(model->named_buffers()["1.running_var"].scalar_type(), at::kBFloat16);
}

struct HasTable : torch::nn::Module {
  explicit HasTable(const at::Tensor& table) {
    register_buffer("table", table);
    weight = register_parameter("weight", torch::ones({3}));
  }
  at::Tensor weight;
};

/// Modules with one buffer in common. A policy casts it in the last of them first.
struct HasTables : torch::nn::Module {
  HasTables() {
    const at::Tensor table = torch::linspace(0, 1, 4);
    register_buffer("table", table);
    register_buffer("same_table", table);
    first = register_module("first", std::make_shared<HasTable>(table));
    second = register_module("second", std::make_shared<HasTable>(table));
  }
  std::shared_ptr<HasTable> first, second;
};

// Shows C2.
TEST(StateDictOptionsTest, ABufferOfSeveralModulesIsSavedInItsOwnDtype) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    const FullyShardOptions options{.mesh = mesh,
                                    .mixed_precision = {.buffer_dtype = at::kBFloat16}};
    FullyShardOptions by_policy = options;
    by_policy.policy = ModuleWrapPolicy<HasTable>();
    for (const bool one_by_one : {false, true}) {
      const auto model = std::make_shared<HasTables>();
      if (one_by_one) {
        fully_shard(*model->second, options);
        fully_shard(*model->first, options);
      }
      fully_shard(*model, one_by_one ? options : by_policy);
      EXPECT_EQ(model->named_buffers()["table"].scalar_type(), at::kBFloat16);
      for (const StateDictType type : {FULL, SHARDED}) {
        const StateDict saved = state_dict(*model, {.type = type});
        for (const char* const name : {"table", "same_table", "first.table", "second.table"}) {
          EXPECT_EQ(saved.tensor(name).scalar_type(), at::kFloat) << name;
        }
      }
      for (const auto& part : {model->first, model->second}) {
        EXPECT_EQ(state_dict(*part).tensor("table").scalar_type(), at::kFloat);
      }
      StateDict saved = state_dict(*model);
      saved.tensor("table").fill_(3);
      load_state_dict(*model, saved);
      EXPECT_TRUE(model->named_buffers()["table"].eq(3).all().item<bool>());
      EXPECT_EQ(model->named_buffers()["table"].scalar_type(), at::kBFloat16);
      StateDict untied = saved;  // as from a format that stores each name
      for (const char* const name : {"same_table", "first.table", "second.table"}) {
        untied.set(name, StateTensor::whole(torch::full({4}, 5.0)));
      }
      untied.set("table", StateTensor::whole(torch::full({4}, 5.0)));
      load_state_dict(*model, untied);
      EXPECT_TRUE(model->named_buffers()["table"].eq(5).all().item<bool>());
    }
  });
}

// Shows C2.
TEST(StateDictOptionsTest, AModuleThatStandsInTheTreeTwiceIsSavedOnceAndLoadedBack) {
  struct TwiceImpl : torch::nn::Module {
    TwiceImpl() {
      const torch::nn::Sequential layers(torch::nn::Linear(3, 3), torch::nn::BatchNorm1d(3));
      first = register_module("first", layers);
      second = register_module("second", layers);
      last = register_module("last", torch::nn::Linear(3, 2));
    }
    torch::nn::Sequential first{nullptr}, second{nullptr};
    torch::nn::Linear last{nullptr};
  };
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    for (const bool has_unit : {false, true}) {
      const auto unsharded = std::make_shared<TwiceImpl>();
      for (at::Tensor& parameter : unsharded->parameters()) {
        const at::NoGradGuard no_grad;
        parameter.copy_(torch::arange(parameter.numel()).reshape(parameter.sizes()));
      }
      const auto model = std::make_shared<TwiceImpl>();
      FullyShardOptions options{.mesh = mesh};
      if (has_unit) options.policy = ModuleWrapPolicy<torch::nn::Sequential>();
      fully_shard(*model, options);
      load_state_dict(*model, state_dict(*unsharded));
      const StateDict found = state_dict(*model);
      expect_equal(found, state_dict(*unsharded));
      EXPECT_THAT(keys_of(found), ::testing::Contains("second.0.weight=first.0.weight"));
      EXPECT_THAT(keys_of(found),
                  ::testing::Contains("second.1.running_mean=first.1.running_mean"));
      {
        const at::NoGradGuard no_grad;
        for (at::Tensor& parameter : model->parameters()) parameter.fill_(7);
      }
      load_state_dict(*model, mesh.rank() == 0 ? found : StateDict(), {.rank0_only = true});
      expect_equal(state_dict(*model), state_dict(*unsharded));
    }
  });
}

// Each rank has buffers of its own, so no layout says that the others hold them.
// Shows E7.
TEST(LoadStateDictTest, BuffersReachAllRanksWithRank0Only) {
  for (const bool is_replicated : {false, true}) {
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
      if (is_replicated) {
        replicate(*model, {.mesh = mesh});
      } else {
        fully_shard(*model, {.mesh = mesh});
      }
      const at::Tensor variance = model->named_buffers()["1.running_var"];
      variance.fill_(mesh.rank() + 3);
      const StateDict saved = state_dict(*model, {.rank0_only = true});
      variance.fill_(77);
      load_state_dict(*model, saved, {.rank0_only = true});
      EXPECT_TRUE(variance.eq(3).all().item<bool>());
    });
  }
}

// Shows E7.
TEST(LoadStateDictTest, NamesOfATiedParameterWithDifferentElementsAreRefused) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    const StateDict before = state_dict(*seeded<Transformer>());
    Transformer plain = seeded<Transformer>();
    Transformer sharded = test::sharded_transformer(mesh);
    StateDict separate = before;
    separate.set("head.weight", StateTensor::whole(before.tensor("embedding.weight").clone()));
    StateDict different = separate;
    different.set("head.weight", StateTensor::whole(before.tensor("embedding.weight") + 1));
    for (Transformer& model : {std::ref(plain), std::ref(sharded)}) {
      for (const bool rank0_only : {false, true}) {
        const auto load = [&](const StateDict& state, bool allow_missing) {
          const bool is_alone = model.ptr() == plain.ptr();
          const bool sends = !rank0_only || is_alone || mesh.rank() == 0;
          return error_of([&] {
            load_state_dict(*model, sends ? state : StateDict(),
                            {.allow_missing = allow_missing, .rank0_only = rank0_only});
          });
        };
        EXPECT_EQ(load(separate, false), "none");
        const std::string error = load(different, false);
        EXPECT_THAT(error,
                    HasSubstr("head.weight: tied tensors: expected the elements of "
                              "embedding.weight, because both names are one tensor in the model, "
                              "found other elements"));
        expect_equal(state_dict(*model), before);
        StateDict one_name = different;  // the same elements may be under the second name alone
        one_name.erase("embedding.weight");
        EXPECT_EQ(load(one_name, true), "none");
        EXPECT_TRUE(
            state_dict(*model).tensor("embedding.weight").equal(different.tensor("head.weight")));
        load_state_dict(*model, before);
      }
    }
  });
}

// Shows E7.
TEST(LoadStateDictTest, NumbersThatACastWouldMakeInfiniteAreRefused) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    for (const at::ScalarType dtype : {at::kHalf, at::kFloat8_e4m3fn}) {
      torch::nn::Linear model(2, 4);
      model->to(at::kHalf);
      model->register_buffer("scale", torch::ones({3}).to(dtype));
      fully_shard(*model, {.mesh = mesh});
      const StateDict before = state_dict(*model);
      StateDict large;
      large.set("weight", StateTensor::whole(torch::full({4, 2}, 2.0)));
      large.set("bias", StateTensor::whole(torch::tensor({1.0, 2.0, 3.0, 4.0})));
      large.set("scale", StateTensor::whole(torch::full({3}, dtype == at::kHalf ? INFINITY : 4)));
      load_state_dict(*model, large, {.allow_cast = true});
      EXPECT_TRUE(state_dict(*model).tensor("bias").equal(
          torch::tensor({1.0, 2.0, 3.0, 4.0}).to(at::kHalf)));
      load_state_dict(*model, before);
      large.set("bias",
                StateTensor::whole(torch::tensor({70000.0, 1.0, -70000.0, double{INFINITY}})));
      large.set("scale", StateTensor::whole(torch::full({3}, 1e6F)));
      for (const bool rank0_only : {false, true}) {
        EXPECT_THAT(error_of([&] {
                      load_state_dict(*model, rank0_only && mesh.rank() > 0 ? StateDict() : large,
                                      {.allow_cast = true, .rank0_only = rank0_only});
                    }),
                    AllOf(HasSubstr("bias: cast: expected numbers that float16 can hold, found 2 "
                                    "elements that are too large for it"),
                          HasSubstr("scale: cast: expected numbers that float"),
                          HasSubstr("found 3 elements that are too large for it")));
        expect_equal(state_dict(*model), before);
      }
    }
  });
}

// Shows E7.
TEST(LoadStateDictTest, WhatOneRankRefusesIsLoadedOnNoneWithRank0Only) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    test::Mlp model = seeded<test::Mlp>();
    fully_shard(*model, {.mesh = mesh});
    const StateDict before = state_dict(*model);
    StateDict other = before;
    other.set("up.bias", StateTensor::whole(torch::ones({13})));
    bool throws = false;
    registry::add_load_state_dict_pre_hook(
        *model->up,
        [&](torch::nn::Module&, StateDict&, const std::string& prefix, LoadReport& report) {
          if (mesh.rank() == 0) return;
          if (throws) throw std::runtime_error("a hook that fails");
          report.add("own rule", prefix + "bias", "zeros", "ones");
        });
    const auto load = [&] {
      return error_of([&] {
        load_state_dict(*model, mesh.rank() == 0 ? other : StateDict(), {.rank0_only = true});
      });
    };
    EXPECT_THAT(load(), AllOf(HasSubstr("rank 1"), HasSubstr("own rule: expected zeros")));
    expect_equal(state_dict(*model), before);
    throws = true;
    EXPECT_THAT(load(), HasSubstr("a hook that fails"));
    expect_equal(state_dict(*model), before);
  });
}

// Shows E7.
TEST(LoadStateDictTest, OneReportListsAllAndNothingIsReplaced) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    test::Mlp model = seeded<test::Mlp>();
    fully_shard(*model, {.mesh = mesh});
    const StateDict before = state_dict(*model);
    StateDict wrong = before;
    wrong.erase("up.bias");
    wrong.set("extra", StateTensor::whole(torch::ones({2})));
    wrong.set("middle.weight", StateTensor::whole(torch::ones({13, 11})));
    wrong.set("down.bias", StateTensor::whole(torch::ones({3}, at::kBFloat16)));
    wrong.set("down.weight", StateTensor::whole(torch::zeros({3, 11})));
    const auto load = [&](const LoadStateDictOptions& options) {
      const bool sends = !options.rank0_only || mesh.rank() == 0;
      return error_of([&] { load_state_dict(*model, sends ? wrong : StateDict(), options); });
    };
    for (const bool rank0_only : {false, true}) {
      const std::string error = load({.rank0_only = rank0_only});
      EXPECT_THAT(error, HasSubstr("4 problems"));
      EXPECT_THAT(error, HasSubstr("up.bias: missing"));
      EXPECT_THAT(error, HasSubstr("extra: unexpected"));
      EXPECT_THAT(error, HasSubstr("middle.weight: shape: expected [11, 13], found [13, 11]"));
      EXPECT_THAT(error, HasSubstr("down.bias: dtype: expected float32, found bfloat16"));
      expect_equal(state_dict(*model), before);
    }
    wrong.erase("middle.weight");
    const LoadStateDictOptions relaxed{
        .allow_missing = true, .allow_unexpected = true, .allow_cast = true};
    for (const bool rank0_only : {false, true}) {
      LoadStateDictOptions options = relaxed;
      options.rank0_only = rank0_only;
      EXPECT_EQ(load(options), "none");
      const StateDict after = state_dict(*model);
      EXPECT_TRUE(after.tensor("down.bias").eq(1).all().item<bool>());
      EXPECT_TRUE(after.tensor("down.weight").eq(0).all().item<bool>());
      EXPECT_TRUE(after.tensor("up.bias").equal(before.tensor("up.bias")));
      load_state_dict(*model, before);
    }
  });
}

// Shows E7.
TEST(LoadStateDictTest, PartsThatDoNotHoldWhatARankNeedsAreAHole) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    test::Mlp model = seeded<test::Mlp>();
    fully_shard(*model, {.mesh = mesh});
    StateDict mine = state_dict(*model, {.type = LOCAL});
    test::Mlp whole = seeded<test::Mlp>();
    EXPECT_THAT(error_of([&] { load_state_dict(*whole, mine); }), HasSubstr("hole"));
  });
}

// Shows E7.
TEST(LoadStateDictTest, WhatRank0AloneHasIsLoadedWithRank0Only) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    test::Mlp model = seeded<test::Mlp>();
    fully_shard(*model, {.mesh = mesh});
    torch::optim::Adam optimizer(model->parameters());
    const StateDict of_model = state_dict(*model, {.rank0_only = true});
    const StateDict of_optimizer = optim_state_dict(*model, optimizer, {.rank0_only = true});
    const auto matches = [&]() -> ::testing::Matcher<std::string> {
      if (mesh.rank() == 0) return ::testing::Eq("none");
      return ::testing::EndsWith(
          "\n  hint: the state dict of this rank is empty: if it was made with rank0_only, load it "
          "with rank0_only");
    }();
    EXPECT_THAT(error_of([&] { load_state_dict(*model, of_model); }), matches);
    EXPECT_THAT(error_of([&] { load_optim_state_dict(*model, optimizer, of_optimizer); }), matches);
  });
}

// Shows C2.
TEST(StateDictOptionsTest, NotWithinAPassOrUnshardParams) {
  test::Mlp model;
  fully_shard(*model, {.mixed_precision = {.param_dtype = at::kBFloat16}});
  const at::Tensor loss = forward(model, torch::ones({1, 7})).sum();
  EXPECT_THAT(error_of([&] { state_dict(*model); }),
              HasSubstr("between a forward and its backward"));
  loss.backward();
  EXPECT_EQ(error_of([&] { state_dict(*model); }), "none");
  {
    const auto scope = unshard_params(*model);
    EXPECT_THAT(error_of([&] { state_dict(*model); }), HasSubstr("within unshard_params"));
  }
  EXPECT_THAT(error_of([&] { state_dict(*model, {.type = SHARDED, .rank0_only = true}); }),
              HasSubstr("rank0_only"));
}

}  // namespace
}  // namespace tessera
