#include <gmock/gmock.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <limits>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "runtime/state/rendezvous.h"
#include "runtime/state/saved_states.h"
#include "runtime/state/small_trainer.h"
#include "runtime/state/value_tree.h"
#include "support/random.h"
#include "support/temporary_directory.h"
#include "tessera/formats/detect.h"

// Unusual state: what cannot be loaded is refused, and what is loaded arrives completely.

namespace tessera {
namespace {

using testing::HasSubstr;

/// Saves a model, changes it, loads it. Returns whether the state is the saved one again.
template <class Model>
bool comes_back(Model& model) {
  const test::TemporaryDirectory directory;
  const at::NoGradGuard no_grad;
  TrainState state(model);
  save(state, directory.path() + "/a");
  std::vector<at::Tensor> tensors, before;
  for (const auto& each : model->named_parameters()) tensors.push_back(each.value());
  for (const auto& each : model->named_buffers()) tensors.push_back(each.value());
  for (at::Tensor& tensor : tensors) {
    before.push_back(tensor.detach().clone());
    tensor.detach().fill_(77);
  }
  load(state, directory.path() + "/a");
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (!torch::equal(tensors[i], before[i])) return false;
  }
  return true;
}

// Shows C1.
TEST(HostileStateTest, BuffersInADtypeOfTheirOwnAreLoaded) {
  torch::nn::Sequential model(torch::nn::Linear(4, 4), torch::nn::BatchNorm1d(4));
  fully_shard(*model, {.mixed_precision = {.param_dtype = torch::kBFloat16,
                                           .buffer_dtype = torch::kBFloat16}});
  forward(model, torch::rand({8, 4})).sum().backward();
  EXPECT_TRUE(comes_back(model));
}

// Shows C1.
TEST(HostileStateTest, TensorsThatAreNotContiguousAreLoaded) {
  const auto model = std::make_shared<torch::nn::Module>("Odd");
  model->register_parameter("w",
                            torch::rand({2, 3, 4, 5}).contiguous(at::MemoryFormat::ChannelsLast));
  model->register_buffer("t", torch::rand({3, 4}).t());
  EXPECT_TRUE(comes_back(model));
}

// Shows C2.
TEST(HostileStateTest, AScopeOfAnotherTypeDoesNotMatterToSaveAndLoad) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    const test::TemporaryDirectory directory;
    test::SmallTrainer trainer(mesh);
    TrainState state = trainer.state();
    std::string path = directory.path() + "/a";
    std::vector<std::string> paths = {path};
    for (const StateDictOptions options :
         {StateDictOptions{.type = FULL}, StateDictOptions{.type = FULL, .rank0_only = true},
          StateDictOptions{.type = LOCAL}}) {
      const StateDictTypeScope scope(*trainer.model, options);
      trainer.fill(3);
      // Ranks are threads, so they can share rank 0's string through a static variable.
      static std::string shared;
      if (mesh.rank() == 0)
        shared = directory.path() + "/" + std::to_string(int(options.type)) +
                 (options.rank0_only ? "0" : "");
      mesh.world()->max(0, "path");
      const std::string where = shared;
      mesh.world()->max(0, "path read");
      save(state, where);
      trainer.fill(9);
      load(state, where);
      test::expect_filled(trainer.model->parameters(), 3, "parameters");
      test::expect_filled(trainer.moments(), 3, "moments");
    }
    mesh.world()->max(0, "done");
  });
}

// Shows C1.
TEST(HostileStateTest, WhatHasNoMemoryIsRefused) {
  const auto model_on = [](at::Device device) {
    auto model = std::make_shared<torch::nn::Module>("Model");
    model->register_parameter("w", torch::empty({3, 3}, device));
    return model;
  };
  const auto saved = model_on(at::kCPU);
  const StateDict whole = state_dict(*saved);
  const test::TemporaryDirectory directory;
  TrainState state(saved);
  save(state, directory.path() + "/a");
  const auto model = model_on(at::kMeta);
  TrainState other(model);
  EXPECT_THAT(test::error_of([&] { load(other, directory.path() + "/a"); }), HasSubstr("meta"));
  EXPECT_THAT(test::error_of([&] { load_state_dict(*model, whole); }), HasSubstr("meta"));
}

// Shows C1.
TEST(HostileStateTest, PartsThatDoNotFitAreRefusedByName) {
  torch::nn::Linear model(torch::nn::LinearOptions(8, 32).bias(false));
  const auto refusal_of = [&](const std::vector<LocalShard>& local_shards) {
    StateTensor entry;
    entry.shape = {32, 8};
    entry.local_shards = local_shards;
    StateDict state;
    state.set("weight", entry);
    return test::error_of([&] { load_state_dict(*model, state); });
  };
  const auto ones = [](std::int64_t numel) { return torch::ones({numel}); };
  EXPECT_THAT(refusal_of({{FlatRange{0, 128}, ones(128)}, {FlatRange{64, 192}, ones(128)}}),
              HasSubstr("weight: hole"));
  EXPECT_EQ(refusal_of({{FlatRange{0, 192}, ones(192)}, {FlatRange{64, 256}, ones(192)}}), "none");
  EXPECT_THAT(refusal_of({{FlatRange{0, 1000}, ones(1000)}}), HasSubstr("weight: shard"));
  EXPECT_THAT(refusal_of({{FlatRange{-5, 256}, ones(261)}}), HasSubstr("weight: shard"));
  EXPECT_THAT(refusal_of({{Box{{}, {}}, ones(1)}}), HasSubstr("weight: shard"));
  EXPECT_THAT(refusal_of({{Box{{0, 0, 0}, {32, 8, 1}}, ones(256)}}), HasSubstr("weight: shard"));
  EXPECT_THAT(refusal_of({{FlatRange{0, 256}, ones(255)}}), HasSubstr("weight: shard"));
  EXPECT_THAT(refusal_of({{FlatRange{0, 256}, at::Tensor()}}), HasSubstr("weight: shard"));
  EXPECT_THAT(refusal_of({{FlatRange{0, 256}, torch::ones({256}, at::kLong)}}),
              HasSubstr("weight: shard"));
  EXPECT_THAT(refusal_of({{FlatRange{0, 256}, torch::ones({16, 16}).t()}}),
              HasSubstr("weight: shard"));
}

// Shows C1.
TEST(HostileStateTest, AnAliasOfItselfIsNotFollowedForEver) {
  StateDict state;
  state.set("a", StateAlias{"b"});
  state.set("b", StateAlias{"a"});
  EXPECT_THAT(test::error_of([&] { state.tensor("a"); }), HasSubstr("alias"));
}

// Shows C3.
TEST(HostileStateTest, HooksMayRemoveThemselvesAndEraseParameters) {
  torch::nn::Linear model(2, 2);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  registry::HookHandle handle;
  int num_calls = 0;
  handle = registry::add_state_dict_post_hook(
      *model,
      [&](torch::nn::Module&, StateDict& state, const std::string&, const StateDictOptions&) {
        ++num_calls;
        state.erase("bias");
        handle.remove();
      });
  EXPECT_THAT(test::error_of([&] { optim_state_dict(*model, optimizer); }), HasSubstr("bias"));
  state_dict(*model);
  EXPECT_EQ(num_calls, 1);
}

/// Renames the entries of a module in state dicts: prefix `from` becomes `to`.
void rename_in_state_dicts(torch::nn::Module& module, const std::string& from,
                           const std::string& to) {
  const auto rename = [](StateDict& state, const std::string& old_front,
                         const std::string& new_front) {
    std::vector<StateDict::Item> moved;
    for (const StateDict::Item& item : state) {
      if (item.fqn.starts_with(old_front)) moved.push_back(item);
    }
    for (const StateDict::Item& item : moved) {
      state.erase(item.fqn);
      state.set(new_front + item.fqn.substr(old_front.size()), item.entry);
    }
  };
  registry::add_state_dict_post_hook(
      module, [=](torch::nn::Module&, StateDict& state, const std::string& prefix,
                  const StateDictOptions&) { rename(state, prefix + from, prefix + to); });
  registry::add_load_state_dict_pre_hook(
      module, [=](torch::nn::Module&, StateDict& state, const std::string& prefix, LoadReport&) {
        rename(state, prefix + to, prefix + from);
      });
}

/// A trainer whose layers have other names in state dicts. `hooks_first`: the hooks that rename are
/// added before fully_shard.
struct RenamedTrainer {
  explicit RenamedTrainer(const dist::Mesh& mesh, bool hooks_first = false)
      : model(test::seeded<test::Mlp>()) {
    if (hooks_first) add_hooks();
    fully_shard(*model, {.mesh = mesh});
    if (!hooks_first) add_hooks();
    optimizer = std::make_unique<torch::optim::AdamW>(
        parameter_groups(*model, [](const WholeParameter& parameter) {
          return torch::optim::AdamWOptions(0.1).weight_decay(parameter.dim() >= 2 ? 0.5 : 0);
        }));
  }
  void add_hooks() {
    rename_in_state_dicts(*model, "up.", "first.");
    rename_in_state_dicts(*model->middle, "weight", "kernel");
  }
  void train() {
    optimizer->zero_grad();
    forward(model, torch::ones({2, 7})).pow(2).sum().backward();
    optimizer->step();
  }
  StateDict state() {
    StateDict all = state_dict(*model);
    for (StateDict::Item& item : optim_state_dict(*model, *optimizer)) {
      all.set("optim." + item.fqn, item.entry);
    }
    return all;
  }
  test::Mlp model;
  std::unique_ptr<torch::optim::AdamW> optimizer;
};

// Shows C1.
TEST(HostileStateTest, LoadHooksRunOnceOnEveryRank) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  // Where the entry is a copy: on no rank, so that everything is read in place, or only on rank 1.
  for (const bool has_copy : {false, true}) {
    SCOPED_TRACE(has_copy);
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      test::Mlp model = test::seeded<test::Mlp>();
      fully_shard(*model, {.mesh = mesh});
      registry::add_state_dict_post_hook(*model, [&, has_copy](torch::nn::Module&, StateDict& state,
                                                               const std::string&,
                                                               const StateDictOptions&) {
        if (!has_copy || mesh.rank() != 1) return;
        for (LocalShard& local : std::get<StateTensor>(*state.find("down.weight")).local_shards) {
          local.tensor = local.tensor.clone();
        }
      });
      int num_pre = 0;
      int num_post = 0;
      registry::add_load_state_dict_pre_hook(
          *model->down,
          [&](torch::nn::Module&, StateDict& state, const std::string& prefix, LoadReport&) {
            ++num_pre;
            EXPECT_TRUE(state.contains(prefix + "weight"));
          });
      registry::add_load_state_dict_post_hook(*model->down,
                                              [&](torch::nn::Module&) { ++num_post; });
      const StateDict saved = state_dict(*model);
      TrainState state(model);
      save(state, path, {.overwrite = OverwritePolicy::replace});
      for (at::Tensor& parameter : model->parameters()) parameter.detach().fill_(77);
      load(state, path);
      EXPECT_EQ(num_pre, has_copy ? 1 : 0);
      EXPECT_EQ(num_post, 1);
      test::expect_same_state(state_dict(*model), saved, "loaded");
      load_state_dict(*model, mesh.rank() == 0 ? saved : StateDict(), {.rank0_only = true});
      EXPECT_EQ(num_pre, has_copy ? 2 : 1);
      EXPECT_EQ(num_post, 2);
    });
  }
}

// Shows C1.
TEST(HostileStateTest, LoadHooksGetTheValuesOfRank0) {
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    test::Mlp model = test::seeded<test::Mlp>();
    fully_shard(*model, {.mesh = mesh});
    Value own = std::int64_t{5};
    registry::add_state_dict_post_hook(
        *model->down, [&](torch::nn::Module&, StateDict& state, const std::string& prefix,
                          const StateDictOptions&) { state.set(prefix + "step", own); });
    registry::add_load_state_dict_pre_hook(
        *model->down,
        [&](torch::nn::Module&, StateDict& state, const std::string& prefix, LoadReport&) {
          const StateEntry* const entry = std::as_const(state).find(prefix + "step");
          own = entry == nullptr ? Value() : std::get<Value>(*entry);
          state.erase(prefix + "step");
        });
    StateDict saved = state_dict(*model);
    const LoadStateDictOptions from_first{.rank0_only = true};
    const auto load = [&] {
      load_state_dict(*model, mesh.rank() == 0 ? saved : StateDict(), from_first);
    };
    own = std::int64_t{10 + mesh.rank()};
    load();
    EXPECT_EQ(own, Value(std::int64_t{5}));
    saved.set("down.step", Value::Dict{{"a", Value::List{1.5, "b"}}});
    load();
    EXPECT_EQ(own, Value(Value::Dict{{"a", Value::List{1.5, "b"}}}));
    saved.set("down.step", StateTensor::whole(torch::ones({2})));
    EXPECT_THAT(test::error_of(load),
                HasSubstr("down.step: missing: expected a value that is not a tensor"));
    saved.erase("down.step");
    load();
    EXPECT_EQ(own, Value());
  });
}

/// Adds a hook that renames in state dicts, without the load hook that undoes this.
void call_weight_kernel(torch::nn::Module& module) {
  registry::add_state_dict_post_hook(
      module,
      [](torch::nn::Module&, StateDict& state, const std::string& prefix, const StateDictOptions&) {
        const StateEntry entry = *state.find(prefix + "weight");
        state.erase(prefix + "weight");
        state.set(prefix + "kernel", entry);
      });
}

// Shows C3.
TEST(HostileStateTest, AHookThatRenamesWithoutALoadHookIsNamedAsTheCause) {
  torch::nn::Conv2d model(3, 4, 2);
  call_weight_kernel(*model);
  const StateDict saved = state_dict(*model);
  const auto names_the_hook = HasSubstr("needs a load pre hook that undoes this");
  for (const LoadStateDictOptions& options :
       {LoadStateDictOptions(), LoadStateDictOptions{.allow_missing = true},
        LoadStateDictOptions{.allow_unexpected = true}}) {
    EXPECT_THAT(test::error_of([&] { load_state_dict(*model, saved, options); }), names_the_hook);
  }
  StateDict other = saved;
  other.set("more", StateTensor::whole(torch::ones({2})));
  registry::add_load_state_dict_pre_hook(
      *model, [](torch::nn::Module&, StateDict& state, const std::string& prefix, LoadReport&) {
        if (!state.contains(prefix + "kernel")) return;
        state.set(prefix + "weight", *state.find(prefix + "kernel"));
        state.erase(prefix + "kernel");
      });
  load_state_dict(*model, saved);
  EXPECT_THAT(test::error_of([&] { load_state_dict(*model, other); }),
              testing::Not(names_the_hook));
  // The load hook undoes the renaming already: the entry itself is missing.
  StateDict incomplete = saved;
  incomplete.erase("kernel");
  EXPECT_THAT(test::error_of([&] { load_state_dict(*model, incomplete); }),
              testing::AllOf(HasSubstr("weight: missing"), testing::Not(names_the_hook)));
}

// Shows C3.
TEST(HostileStateTest, AliasesFollowATiedWeightThatAHookRenames) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    for (const bool is_sharded : {false, true}) {
      test::Transformer model = test::seeded<test::Transformer>();
      if (is_sharded) fully_shard(*model, {.mesh = mesh});
      if (!is_sharded) replicate(*model, {.mesh = mesh});
      call_weight_kernel(*model->embedding);
      registry::HookHandle hook = registry::add_load_state_dict_pre_hook(
          *model->embedding,
          [](torch::nn::Module&, StateDict& state, const std::string& prefix, LoadReport&) {
            state.set(prefix + "weight", *state.find(prefix + "kernel"));
            state.erase(prefix + "kernel");
          });
      torch::optim::AdamW optimizer(test::unique_parameters(*model));
      forward(model, test::some_ids()).sum().backward();
      optimizer.step();
      const StateDict saved = state_dict(*model);
      EXPECT_EQ(std::get<StateAlias>(*saved.find("head.weight")).target, "embedding.kernel");
      TrainState state(model, optimizer);
      save(state, path, {.overwrite = OverwritePolicy::replace});
      const auto expect_loaded = [&](const std::string& how) {
        test::expect_same_state(state_dict(*model), saved, how);
        for (at::Tensor& parameter : model->parameters()) parameter.detach().fill_(77);
      };
      expect_loaded("as trained");
      load(state, path);
      expect_loaded("load");
      load_state_dict(*model, saved);
      expect_loaded("load_state_dict");
      load_state_dict(*model, mesh.rank() == 0 ? saved : StateDict(), {.rank0_only = true});
      expect_loaded("rank 0's dict");
      registry::add_state_dict_post_hook(
          *model, [](torch::nn::Module&, StateDict& dict, const std::string&,
                     const StateDictOptions&) { dict.erase("embedding.kernel"); });
      TrainState of_model(model.ptr());
      EXPECT_THAT(test::error_of([&] { save(of_model, path + "b"); }),
                  HasSubstr("head.weight: alias in a state dict: expected an entry "
                            "model.embedding.weight, which"));
    }
  });
}

// Shows C3.
TEST(HostileStateTest, ARenamedEntryThatIsACopyNeedsALoadHook) {
  const test::TemporaryDirectory directory;
  torch::nn::Conv2d model(3, 4, 2);
  model->weight.set_data(torch::rand({4, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast));
  call_weight_kernel(*model);
  TrainState state(model.ptr());
  save(state, directory.path() + "/a");
  EXPECT_THAT(test::error_of([&] { load(state, directory.path() + "/a"); }),
              HasSubstr("needs a load pre hook that undoes this"));
}

// Shows C3.
TEST(HostileStateTest, WhatAHookSavesInAnotherDtypeIsLoadedWithAllowCast) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  torch::nn::Linear model(3, 2);
  registry::add_state_dict_post_hook(
      *model,
      [](torch::nn::Module&, StateDict& state, const std::string& prefix, const StateDictOptions&) {
        const at::Tensor weight = state.tensor(prefix + "weight");
        state.set(prefix + "weight", StateTensor::whole(weight.to(at::kBFloat16)));
      });
  TrainState state(model.ptr());
  save(state, path);
  const at::Tensor rounded = model->weight.detach().to(at::kBFloat16).to(at::kFloat);
  EXPECT_THAT(test::error_of([&] { load(state, path); }),
              HasSubstr("weight: dtype: expected float32, found bfloat16"));
  load(state, path, {.allow_cast = true});
  EXPECT_TRUE(model->weight.equal(rounded));
}

/// How hooks change the weight of a layer in state dicts; its load pre hook undoes this.
struct WeightHooks {
  std::string key;             // instead of `weight`
  at::ScalarType saved_dtype;  // of the entry

  void add_to(torch::nn::Module& layer, at::ScalarType dtype) const {
    registry::add_state_dict_post_hook(
        layer, [*this](torch::nn::Module&, StateDict& state, const std::string& prefix,
                       const StateDictOptions&) {
          move_and_cast(state, prefix + "weight", prefix + key, saved_dtype);
        });
    registry::add_load_state_dict_pre_hook(
        layer, [*this, dtype](torch::nn::Module&, StateDict& state, const std::string& prefix,
                              LoadReport&) {
          if (!state.contains(prefix + key)) return;
          move_and_cast(state, prefix + key, prefix + "weight", dtype);
        });
  }

 private:
  static void move_and_cast(StateDict& state, const std::string& from, const std::string& to,
                            at::ScalarType dtype) {
    StateTensor entry = std::get<StateTensor>(*state.find(from));
    entry.dtype = StateTensor::whole(torch::empty({0}, dtype)).dtype;
    for (LocalShard& local : entry.local_shards) local.tensor = local.tensor.to(dtype);
    state.erase(from);
    state.set(to, std::move(entry));
  }
};

/// Hooks on three layers, a rename of the first layer, and a model of another dtype and on other
/// ranks than at the save. Shows C1, C2, E7.
TEST(HostileStateTest, HooksRenamesAndCastsTogetherLoadWhatWasSaved) {
  test::Random random;
  for (int round = 0; round < 8; ++round) {
    SCOPED_TRACE(round);
    std::vector<WeightHooks> hooks;
    for (int i = 0; i < 3; ++i) {
      hooks.push_back(
          {random.flip() ? "kernel" : "weight", random.flip() ? at::kDouble : at::kFloat});
    }
    const at::ScalarType dtype = random.flip() ? at::kHalf : at::kFloat;
    const bool is_renamed = random.flip();
    const auto build = [&](const dist::Mesh& mesh, bool is_sharded, bool hooks_first,
                           const std::string& first, at::ScalarType its_dtype) {
      const auto model = std::make_shared<torch::nn::Module>();
      const test::Mlp layers = test::seeded<test::Mlp>();
      model->register_module(first, layers->up.ptr());
      model->register_module("middle", layers->middle.ptr());
      model->register_module("down", layers->down.ptr());
      model->to(its_dtype);
      const auto add_hooks = [&] {
        for (std::size_t i = 0; i < 3; ++i) hooks[i].add_to(*model->children()[i], its_dtype);
      };
      if (hooks_first) add_hooks();
      if (is_sharded) fully_shard(*model, {.mesh = mesh});
      if (!is_sharded) replicate(*model, {.mesh = mesh});
      if (!hooks_first) add_hooks();
      return model;
    };
    const test::TemporaryDirectory directory;
    const std::string path = directory.path() + "/a";
    StateDict saved;
    const auto on = [&](const std::function<void(const dist::Mesh&, bool, bool)>& body) {
      const bool is_sharded = random.flip();
      const bool hooks_first = random.flip();
      test::on_ranks(static_cast<int>(random.between(1, 4)),
                     [&](const dist::Mesh& mesh) { body(mesh, is_sharded, hooks_first); });
    };
    on([&](const dist::Mesh& mesh, bool is_sharded, bool hooks_first) {
      const auto model =
          build(mesh, is_sharded, hooks_first, is_renamed ? "old" : "up", at::kFloat);
      torch::optim::AdamW optimizer(parameters(*model));
      TrainState state(model, optimizer);
      save(state, path);
      StateDict whole = state_dict(*model);
      if (mesh.rank() == 0) saved = std::move(whole);
    });
    on([&](const dist::Mesh& mesh, bool is_sharded, bool hooks_first) {
      const auto model = build(mesh, is_sharded, hooks_first, "up", dtype);
      torch::optim::AdamW optimizer(parameters(*model));
      TrainState state(model, optimizer);
      for (at::Tensor& parameter : model->parameters()) parameter.detach().fill_(77);
      LoadOptions options{.allow_cast = true};
      if (is_renamed) options.renames = {{"model.old.", "model.up."}};
      load(state, path, options);
      const StateDict loaded = state_dict(*model);
      EXPECT_EQ(loaded.size(), saved.size());
      for (const StateDict::Item& item : saved) {
        const std::string key =
            item.fqn.starts_with("old.") ? "up." + item.fqn.substr(4) : item.fqn;
        const at::Tensor expected = saved.tensor(item.fqn).to(dtype).to(at::kDouble);
        EXPECT_TRUE(loaded.tensor(key).to(at::kDouble).equal(expected)) << key;
      }
    });
  }
}

// Shows C9.
TEST(HostileStateTest, AnotherSaveThatReplacesFilesBeforeTheyAreOpenedIsNoticed) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  const std::string other = directory.path() + "/other";
  torch::nn::Linear model(3, 2);
  TrainState state(model.ptr());
  save(state, path, {.format = formats::Format::dcp});
  save(state, other, {.format = formats::Format::dcp});
  bool has_replaced = false;
  registry::add_state_dict_post_hook(
      *model, [&](torch::nn::Module&, StateDict&, const std::string&, const StateDictOptions&) {
        // The load has read .metadata, but no file of elements. A save writes .metadata last.
        if (std::exchange(has_replaced, true)) return;
        std::filesystem::rename(other + "/__0_0.distcp", path + "/__0_0.distcp");
      });
  EXPECT_THAT(test::error_of([&] { load(state, path); }),
              HasSubstr("file: expected the file as it was before it was opened"));
  EXPECT_TRUE(has_replaced);
}

/// A store of a rank that is slow to read: it notes when it has read rank 0's answer. Its
/// connection breaks before the rank can tell rank 0, if the store says so.
class SlowStore final : public c10d::PrefixStore {
 public:
  SlowStore(const c10::intrusive_ptr<c10d::Store>& store, std::atomic<int>& num_read,
            bool breaks = false)
      : PrefixStore("", store), num_read_(num_read), breaks_(breaks) {}
  c10::intrusive_ptr<c10d::Store> clone() override {
    return c10::make_intrusive<SlowStore>(getUnderlyingStore(), num_read_, breaks_);
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    if (breaks_ && key.ends_with("/read")) throw std::runtime_error("connection reset by peer");
    return PrefixStore::add(key, value);
  }
  std::vector<std::uint8_t> get(const std::string& key) override {
    if (!key.ends_with("/all")) return PrefixStore::get(key);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    auto answer = PrefixStore::get(key);
    ++num_read_;
    return answer;
  }

 private:
  std::atomic<int>& num_read_;
  bool breaks_;
};

dist::Mesh connect_slowly(const dist::Mesh& mesh, std::atomic<int>& num_read, bool breaks) {
  auto* const store = dynamic_cast<c10d::PrefixStore*>(mesh.world()->store().get());
  TESSERA_CHECK(store != nullptr);
  dist::MeshOptions options;
  options.transport = dist::gloo("lo");
  return dist::connect(
      c10::make_intrusive<SlowStore>(store->getUnderlyingStore(), num_read, breaks), mesh.rank(),
      mesh.world_size(), options);
}

TEST(HostileStateTest, RankZeroLeavesWhenTheOthersHaveReadItsLastMessage) {
  std::atomic<int> num_read = 0;
  test::on_ranks(3, [&](const dist::Mesh& mesh) {
    state::Rendezvous rendezvous(connect_slowly(mesh, num_read, false));
    rendezvous.exchange("own", "test");
    EXPECT_TRUE(mesh.rank() != 0 || num_read == 2) << "now the process of rank 0 may end";
  });
}

TEST(HostileStateTest, RankZeroLeavesWhenTheOthersHaveReadThatARankIsMissing) {
  std::atomic<int> num_read = 0;
  test::on_ranks(3, [&](const dist::Mesh& mesh) {
    state::Rendezvous rendezvous(connect_slowly(mesh, num_read, false));
    if (mesh.rank() == 2) return;
    rendezvous.set_timeout(std::chrono::seconds(2));
    EXPECT_THAT(test::error_of([&] { rendezvous.exchange("own", "test"); }),
                HasSubstr("test: rank 2 sent no answer"));
    EXPECT_EQ(num_read, 1);
  });
}

TEST(HostileStateTest, ARankThatHasReadTheLastMessageIgnoresThatTheStoreIsGone) {
  std::atomic<int> num_read = 0;
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    state::Rendezvous rendezvous(connect_slowly(mesh, num_read, mesh.rank() == 1));
    rendezvous.set_timeout(std::chrono::seconds(4));  // for which rank 0 waits in vain
    EXPECT_EQ(rendezvous.exchange("own", "test").size(), 2U);
  });
}

// Shows C3.
TEST(HostileStateTest, OptimizerStateFollowsParametersThatHooksRename) {
  for (const bool hooks_first : {false, true}) {
    SCOPED_TRACE(hooks_first);
    const test::TemporaryDirectory directory;
    const std::string path = directory.path() + "/a";
    StateDict saved;
    StateDict trained;
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      RenamedTrainer trainer(mesh, hooks_first);
      trainer.train();
      TrainState state(trainer.model, *trainer.optimizer);
      save(state, path);
      const StateDict all = trainer.state();
      trainer.train();
      const StateDict after = trainer.state();
      if (mesh.rank() == 0) {
        saved = all;
        trained = after;
      }
    });
    for (const std::string name : {"first.weight", "middle.kernel", "middle.bias", "down.weight"}) {
      EXPECT_TRUE(saved.contains(name)) << name;
      EXPECT_TRUE(saved.contains("optim.state." + name + ".exp_avg")) << name;
    }
    EXPECT_FALSE(saved.contains("optim.state.up.weight.exp_avg"));
    EXPECT_EQ(saved.tensor("first.weight").sizes(), at::IntArrayRef({13, 7}));
    EXPECT_EQ(saved.tensor("optim.state.middle.kernel.exp_avg").sizes(), at::IntArrayRef({11, 13}));
    const auto reader = formats::open_checkpoint(FileSystem::posix(), path);
    EXPECT_NE(reader->contents().find_tensor("optim.state.first.weight.exp_avg"), nullptr);
    for (const int world_size : {1, 4}) {
      SCOPED_TRACE(world_size);
      test::on_ranks(world_size, [&](const dist::Mesh& mesh) {
        RenamedTrainer trainer(mesh, hooks_first);
        TrainState state(trainer.model, *trainer.optimizer);
        load(state, path);
        test::expect_same_state(trainer.state(), saved, "loaded");
        trainer.train();
        const StateDict after = trainer.state();
        for (const StateDict::Item& item : trained) {
          if (!std::holds_alternative<StateTensor>(item.entry)) continue;
          EXPECT_TRUE(after.tensor(item.fqn).allclose(trained.tensor(item.fqn))) << item.fqn;
        }
        RenamedTrainer other(mesh, hooks_first);
        load_optim_state_dict(*other.model, *other.optimizer,
                              optim_state_dict(*trainer.model, *trainer.optimizer));
        test::expect_same_state(optim_state_dict(*other.model, *other.optimizer),
                                optim_state_dict(*trainer.model, *trainer.optimizer), "dict");
        const StateDict by_id =
            rekey_optim_state_dict(optim_state_dict(*trainer.model, *trainer.optimizer),
                                   OptimStateKey::param_id, *trainer.model, *trainer.optimizer);
        EXPECT_TRUE(by_id.contains("state.0.exp_avg"));
      });
    }
  }
}

// Shows C3.
TEST(HostileStateTest, AHookThatChangesAParametersShapeIsRefusedByName) {
  torch::nn::Linear model(2, 3);
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  registry::add_state_dict_post_hook(*model, [&](torch::nn::Module&, StateDict& state,
                                                 const std::string&, const StateDictOptions&) {
    auto& weight = std::get<StateTensor>(*state.find("weight"));
    weight = StateTensor::whole(weight.tensor("weight").t().contiguous());
  });
  EXPECT_THAT(test::error_of([&] { optim_state_dict(*model, optimizer); }),
              HasSubstr("weight: parameter of the optimizer in the model's state dict: expected "
                        "[3, 2], as in the model, found [2, 3]"));
}

// Shows E7.
TEST(HostileStateTest, NumbersThatDoNotFitAreRefused) {
  const auto refusal_of = [](auto to, const Value& from) {
    return test::error_of([&] { stateful(to).load_state_dict(from); });
  };
  EXPECT_THAT(refusal_of(int{}, Value(std::int64_t{5'000'000'007})), HasSubstr("5000000007"));
  EXPECT_THAT(refusal_of(unsigned{}, Value(-1)), HasSubstr("-1"));
  EXPECT_THAT(refusal_of(std::uint8_t{}, Value(300)), HasSubstr("300"));
  EXPECT_THAT(refusal_of(float{}, Value(1e300)), HasSubstr("1e+300"));
  EXPECT_EQ(refusal_of(float{}, Value(std::numeric_limits<double>::infinity())), "none");
  EXPECT_EQ(refusal_of(std::uint8_t{}, Value(255)), "none");
}

// Shows C7.
TEST(HostileStateTest, StepsThatAreNoCountsAreRefused) {
  torch::nn::Linear model(2, 2);
  torch::optim::Adam optimizer(model->parameters());
  model->forward(torch::ones({1, 2})).sum().backward();
  optimizer.step();
  for (const double step : {std::nan(""), -3.0, 1e19, 2.5}) {
    const StateDict before = optim_state_dict(*model, optimizer);
    StateDict state = before;
    state.set("state.weight.step", StateTensor::whole(torch::tensor(step, at::kDouble)),
              {"state", "weight", "step"});
    state.set("state.bias.exp_avg", StateTensor::whole(torch::full({2}, 77.0F)),
              {"state", "bias", "exp_avg"});
    for (const bool rank0_only : {false, true}) {
      EXPECT_THAT(test::error_of([&] {
                    load_optim_state_dict(*model, optimizer, state, {.rank0_only = rank0_only});
                  }),
                  HasSubstr("state.weight.step"))
          << step;
      test::expect_same_state(optim_state_dict(*model, optimizer), before, "after the error");
    }
  }
  StateDict state = optim_state_dict(*model, optimizer);
  state.set("state.weight.exp_avg", StateTensor::whole(torch::ones({2, 2}, at::kBool)),
            {"state", "weight", "exp_avg"});
  EXPECT_THAT(test::error_of([&] { load_optim_state_dict(*model, optimizer, state); }),
              HasSubstr("state.weight.exp_avg"));
}

// Shows E4.
TEST(HostileStateTest, KeepLastRemovesOlderOnesOfTheSameNameAlone) {
  const test::TemporaryDirectory directory;
  torch::nn::Linear model(2, 2);
  TrainState state(model);
  const auto path = [&](const std::string& name) { return directory.path() + "/" + name; };
  for (const std::string name : {"step-9", "step-10", "other-3"}) save(state, path(name));
  save(state, path("archive.safetensors"), {.format = formats::Format::safetensors});
  save(state, path("best"), {.keep_last = 1});
  EXPECT_TRUE(std::filesystem::exists(path("best")));
  EXPECT_TRUE(std::filesystem::exists(path("step-9")));
  save(state, path("step-11"), {.keep_last = 2});
  EXPECT_FALSE(std::filesystem::exists(path("step-9")));
  for (const std::string name : {"step-10", "step-11", "other-3", "best", "archive.safetensors"}) {
    EXPECT_TRUE(std::filesystem::exists(path(name))) << name;
  }
  // An older step that is saved again is not removed.
  save(state, path("step-2"), {.keep_last = 1});
  EXPECT_TRUE(std::filesystem::exists(path("step-2")));
}

// Shows E13.
TEST(HostileStateTest, PartsOfValuesCannotBeLoadedAlone) {
  const test::TemporaryDirectory directory;
  torch::nn::Linear model(2, 2);
  Value dict = Value::Dict{{"x", 1}, {"y", 2}};
  TrainState state(model);
  state.with("v", dict);
  save(state, directory.path() + "/a");
  const auto load_only = [&](const std::vector<std::string>& only) {
    dict = 0;
    return test::error_of([&] { load(state, directory.path() + "/a", {.only = only}); });
  };
  EXPECT_EQ(load_only({"v.*"}), "none");
  EXPECT_EQ(dict, Value(Value::Dict{{"x", 1}, {"y", 2}}));
  EXPECT_THAT(load_only({"model.*", "v.x"}), HasSubstr("v"));
  EXPECT_EQ(dict, Value(0));
  EXPECT_EQ(load_only({"model.*"}), "none");
  EXPECT_EQ(dict, Value(0));
}

// Shows E7.
TEST(HostileStateTest, ValuesThatDoNotFitAreToldBeforeAnythingIsLoaded) {
  const test::TemporaryDirectory directory;
  torch::nn::Linear model(2, 2);
  std::string text = "abc";
  std::int64_t fine = 1;
  TrainState state(model);
  save(state.with("a_fine", fine).with("step", text).per_rank("own", text),
       directory.path() + "/a");
  const at::NoGradGuard no_grad;
  model->weight.fill_(7);
  std::int64_t number = 5;
  TrainState other(model);
  other.with("a_fine", fine).with("step", number).per_rank("own", number);
  fine = 2;
  const std::string error = test::error_of([&] { load(other, directory.path() + "/a"); });
  EXPECT_THAT(error, HasSubstr("step: value"));
  EXPECT_THAT(error, HasSubstr("own: value"));
  EXPECT_EQ(fine, 2);
  EXPECT_TRUE(model->weight.eq(7).all().item<bool>());
  EXPECT_THAT(test::error_of([&] { TrainState(model).with("0", number); }), HasSubstr("number"));
}

// Shows E2.
TEST(HostileStateTest, ValuesThatNobodyCouldReadAreRefusedWhenSaved) {
  const test::TemporaryDirectory directory;
  torch::nn::Linear model(2, 2);
  for (Value value : {Value("r\xffn"), Value(Value::Dict{{Value::List{1}, 2}})}) {
    TrainState state(model);
    state.with("v", value);
    for (const auto format : {formats::Format::dcp, formats::Format::torch_zip}) {
      EXPECT_THAT(
          test::error_of([&] { save(state, directory.path() + "/a.pt", {.format = format}); }),
          ::testing::AnyOf(HasSubstr("cannot be pickled"), HasSubstr("that Python can hash")));
    }
    save(state, directory.path() + "/native", {.overwrite = OverwritePolicy::replace});
    const Value saved = std::exchange(value, Value());
    load(state, directory.path() + "/native");
    EXPECT_EQ(value, saved);
  }
}

// Shows E4.
TEST(HostileStateTest, TimesThatAreNoneAreRefused) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    test::SmallTrainer trainer(mesh);
    TrainState state = trainer.state();
    for (const auto timeout : {std::chrono::milliseconds(0), std::chrono::milliseconds(-5)}) {
      EXPECT_THAT(test::error_of([&] { save(state, "nowhere", {.timeout = timeout}); }),
                  HasSubstr("timeout"));
    }
    const test::TemporaryDirectory directory;
    EXPECT_THAT(test::error_of(
                    [&] { save(state, "/none/a", {.timeout = std::chrono::milliseconds::max()}); }),
                HasSubstr("none"));
  });
  EXPECT_THAT(test::error_of([] { TrainState(std::shared_ptr<torch::nn::Module>()); }),
              HasSubstr("model"));
}

// Shows E13.
TEST(HostileStateTest, PartsOfAnOptimizersStateCannotBeLoadedAlone) {
  const test::TemporaryDirectory directory;
  torch::nn::Sequential model(torch::nn::Linear(4, 3), torch::nn::Linear(3, 2));
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.1));
  model->forward(torch::ones({1, 4})).sum().backward();
  optimizer.step();
  TrainState state(model, optimizer);
  for (const bool flattened : {false, true}) {
    const std::string path = directory.path() + (flattened ? "/flattened" : "/nested");
    save(state, path, {.flatten_optimizer_state_dict = flattened});
    const auto load_only = [&](const std::vector<std::string>& only) {
      return test::error_of([&] { load(state, path, {.only = only}); });
    };
    EXPECT_THAT(load_only({"optim.state.*.exp_avg"}),
                HasSubstr("optim.state.0.bias: only: expected a pattern that selects all state of "
                          "the parameter"));
    EXPECT_THAT(load_only({"!optim.state.1.weight.step"}), HasSubstr("optim.state.1.weight: only"));
    EXPECT_THAT(
        load_only({flattened ? "optim.param_groups.0.weight.lr" : "optim.param_groups.0.lr"}),
        HasSubstr(
            "optim.param_groups: only: expected a pattern that selects all parameter groups"));
    for (const char* whole : {"optim", "optim.state.*", "optim.state.0.bias", "optim.param_groups",
                              "!optim.param_groups", "!optim.state.1.*"}) {
      EXPECT_EQ(load_only({whole}), "none") << whole;
    }
  }
}

// Shows C7.
TEST(HostileStateTest, OptimizerStateInAnotherDtypeIsForTheCallerToAllow) {
  const test::TemporaryDirectory directory;
  torch::nn::Linear model(4, 3);
  torch::optim::Adam optimizer(model->parameters());
  model->forward(torch::ones({1, 4})).sum().backward();
  optimizer.step();
  for (auto& [parameter, its_state] : optimizer.state()) {
    auto& adam = static_cast<torch::optim::AdamParamState&>(*its_state);
    adam.exp_avg(adam.exp_avg().to(at::kBFloat16));
  }
  {
    TrainState state(model, optimizer);
    save(state, directory.path() + "/a");
    EXPECT_EQ(test::error_of([&] { load(state, directory.path() + "/a"); }), "none");
  }
  const StateDict saved = optim_state_dict(*model, optimizer);
  const std::string refusal = "state.weight.exp_avg: dtype: expected float32, found bfloat16";
  const std::string key = "state.weight.exp_avg";
  const auto expect_cast = [&](const torch::optim::Optimizer& loaded) {
    const at::Tensor found = optim_state_dict(*model, loaded).tensor(key);
    EXPECT_EQ(found.scalar_type(), at::kFloat);
    EXPECT_TRUE(found.equal(saved.tensor(key).to(at::kFloat)));
  };
  for (const bool has_state : {false, true}) {
    torch::optim::Adam other(model->parameters());
    if (has_state) other.step();
    TrainState state(model, other);
    EXPECT_THAT(test::error_of([&] { load(state, directory.path() + "/a"); }),
                HasSubstr("optim." + refusal));
    load(state, directory.path() + "/a", {.allow_cast = true});
    expect_cast(other);
    torch::optim::Adam third(model->parameters());
    if (has_state) third.step();
    EXPECT_THAT(test::error_of([&] { load_optim_state_dict(*model, third, saved); }),
                HasSubstr(refusal));
    load_optim_state_dict(*model, third, saved, {.allow_cast = true});
    expect_cast(third);
  }
}

// Shows E7.
TEST(HostileStateTest, AValueOfManyKeysIsFoundInAboutAsManySteps) {
  // An algorithm that scans all keys for each key would take half an hour here.
  state::ValueTree tree;
  Value::Dict dict;
  for (int i = 0; i < 200'000; ++i) dict.emplace_back("key" + std::to_string(i), i);
  tree.add({"v"}, Value(dict));
  const auto found = tree.find({"v"});
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->get_if<Value::Dict>()->size(), dict.size());
  EXPECT_EQ(tree.find({"v", "key7"}), Value(7));
  EXPECT_FALSE(tree.find({"v", "key"}).has_value());
}

Value nested(int num_levels) {
  Value value = Value::List{};
  for (int i = 1; i < num_levels; ++i) {
    Value::List list;
    list.push_back(std::move(value));
    value = std::move(list);
  }
  return value;
}

// Shows E2.
TEST(HostileStateTest, ValuesNestedTooDeepAreRefusedByName) {
  const test::TemporaryDirectory directory;
  torch::nn::Linear model(2, 2);
  const auto round_trip = [&](const Value& saved, formats::Format format, const std::string& name) {
    Value shared = saved;
    Value own = saved;
    TrainState state(model);
    state.with("deep", shared).per_rank("own", own);
    return test::error_of([&] {
      save(state, directory.path() + "/" + name, {.format = format});
      shared = own = Value();
      load(state, directory.path() + "/" + name);
      EXPECT_TRUE(shared == saved) << name << value_to_string(shared);
      EXPECT_TRUE(own == saved) << name << value_to_string(own);
    });
  };
  Value pairs = 1;  // this kind of level takes the most JSON levels
  for (int i = 0; i < state::kMaxValueDepth; ++i) pairs = Value::Dict{{"$", std::move(pairs)}};
  for (const auto format : {formats::Format::native, formats::Format::safetensors,
                            formats::Format::dcp, formats::Format::torch_zip}) {
    const std::string name(format.name());
    EXPECT_EQ(round_trip(nested(state::kMaxValueDepth), format, name), "none") << name;
    EXPECT_EQ(round_trip(pairs, format, name + "-pairs"), "none") << name;
  }
  for (const int num_levels : {state::kMaxValueDepth + 2, 2000}) {
    EXPECT_THAT(round_trip(nested(num_levels), formats::Format::native, "none"),
                HasSubstr("deep: value: expected at most 60 levels, found more"));
  }
}

// Shows C7.
TEST(HostileStateTest, ARenamedDictStaysOne) {
  const test::TemporaryDirectory directory;
  const std::string path = directory.path() + "/a";
  torch::nn::Linear model(2, 2);
  const Value dict = Value::Dict{{"0", 1}, {"1", Value::Dict{{"2", Value::List{5}}}}};
  Value value = dict;
  {
    TrainState state(model);
    save(state.with("old", value), path);
  }
  TrainState state(model);
  state.with("v", value);
  for (const reshard::Rename& rename :
       {reshard::Rename{"old", "v"}, reshard::Rename{"old.", "v."}}) {
    value = 0;
    load(state, path, {.renames = {rename}});
    EXPECT_EQ(value, dict);
  }
}

// Shows E4.
TEST(HostileStateTest, WhatFailsOnOneRankBeforeTheRanksMeetIsToldToAll) {
  const test::TemporaryDirectory directory;
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    test::SmallTrainer trainer(mesh);
    // A tensor on the meta device cannot be copied for a save in the background.
    const auto device = mesh.rank() == 0 ? at::kMeta : at::kCPU;  // rank 0's buffers are saved
    trainer.model->register_buffer("a", torch::ones({3}, device));
    const std::string of_rank_0 = mesh.rank() == 0 ? "meta" : "rank 0: ";
    TrainState state = trainer.state();
    for (const auto format : {formats::Format::native, formats::Format::torch_zip}) {
      for (const bool async : {true, false}) {
        EXPECT_THAT(test::error_of([&] {
                      save(state, directory.path() + "/a.pt", {.format = format, .async = async});
                      state.wait();
                    }),
                    HasSubstr(of_rank_0));
      }
    }
    std::optional<std::chrono::milliseconds> timeout;
    if (mesh.rank() == 1) timeout = std::chrono::milliseconds(-1);
    EXPECT_THAT(test::error_of([&] { save(state, directory.path() + "/a", {.timeout = timeout}); }),
                HasSubstr(mesh.rank() == 1 ? "timeout" : "rank 1: "));
  });
  EXPECT_TRUE(FileSystem::posix().list_directory(directory.path()).empty());
}

// Shows E2.
TEST(HostileStateTest, ASlashBehindAPathIsNoPartOfIt) {
  const test::TemporaryDirectory directory;
  torch::nn::Linear model(2, 2);
  TrainState state(model);
  const std::string path = directory.path() + "/a.safetensors";
  save(state, path + "/", {.format = formats::Format::safetensors});
  EXPECT_EQ(FileSystem::posix().kind_of(path), FileKind::regular);
  EXPECT_EQ(load(state, path + "//").path, path);
}

// Shows E4.
TEST(HostileStateTest, WhatIsNotThereIsAnError) {
  const test::TemporaryDirectory directory;
  torch::nn::Linear model(2, 2);
  std::int64_t number = 0;
  TrainState state(model);
  const std::string path = directory.path() + "/a";
  EXPECT_THAT(test::error_of([&] { save(state, path, {.file_system = nullptr}); }),
              HasSubstr("file_system: expected a file system, found a null pointer"));
  EXPECT_THAT(test::error_of([&] { load(state, path, {.file_system = nullptr}); }),
              HasSubstr("file_system: expected a file system, found a null pointer"));
  const TrainState moved_to = std::move(state);
  const auto refusal_of = [&](const auto& action) { return test::error_of(action); };
  const auto matches = HasSubstr("a TrainState that was moved from");
  EXPECT_THAT(refusal_of([&] { save(state, path); }), matches);  // NOLINT: tests use after move
  EXPECT_THAT(refusal_of([&] { load(state, path); }), matches);
  EXPECT_THAT(refusal_of([&] { state.wait(); }), matches);
  EXPECT_THAT(refusal_of([&] { state.with("number", number); }), matches);
  EXPECT_THAT(refusal_of([&] { state.per_rank("number", number); }), matches);
}

// Shows C3.
TEST(HostileStateTest, ATrainStateMadeBeforeFullyShardSaysSo) {
  const test::TemporaryDirectory directory;
  test::on_ranks(2, [&](const dist::Mesh& mesh) {
    torch::nn::Linear model(4, 4);
    TrainState state(model);
    fully_shard(*model, {.mesh = mesh});
    const auto matches = HasSubstr(
        "TrainState: made before the model was sharded: it is for 1 rank, the model is "
        "on 2 ranks");
    EXPECT_THAT(test::error_of([&] { save(state, directory.path() + "/a"); }), matches);
    EXPECT_THAT(test::error_of([&] { load(state, directory.path() + "/a"); }), matches);
  });
  EXPECT_TRUE(FileSystem::posix().list_directory(directory.path()).empty());
}

}  // namespace
}  // namespace tessera
