#include <gmock/gmock.h>
#include <torch/torch.h>

#include "runtime/fsdp/pass.h"
#include "runtime/support/checks.h"

namespace tessera {
namespace {

using test::Block;
using test::seeded;
using test::some_ids;
using test::Transformer;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Not;

Transformer sharded(const dist::Mesh& mesh, FullyShardOptions options) {
  Transformer model = seeded<Transformer>();
  options.mesh = mesh;
  options.policy = ModuleWrapPolicy<Block>();
  fully_shard(*model, options);
  return model;
}

// Shows B21.
TEST(ExecutionOrderTest, BackwardPrePrefetchGathersBeforeTheCurrentUnitIsReduced) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = sharded(mesh, {.backward_prefetch = BACKWARD_PRE});
    for (int step = 0; step < 3; ++step) {
      forward(model, some_ids()).sum().backward();
      if (step == 0) continue;
      EXPECT_THAT(
          recorded_order(*model),
          ElementsAre("unshard the root", "unshard blocks.0", "unshard blocks.1",
                      "unshard blocks.2", "unshard blocks.2", "unshard blocks.1", "reduce blocks.2",
                      "unshard blocks.0", "reduce blocks.1", "reduce blocks.0", "reduce the root"));
    }
  });
}

// Shows B21.
TEST(ExecutionOrderTest, BackwardPostPrefetchGathersAfterIt) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = sharded(mesh, {.backward_prefetch = BACKWARD_POST});
    for (int step = 0; step < 2; ++step) forward(model, some_ids()).sum().backward();
    const at::Tensor output = forward(model, some_ids());
    std::vector<std::string> when_reduced;
    model->blocks[2]->as<Block>()->norm->weight.register_hook(
        [&](const at::Tensor&) { when_reduced = recorded_order(*model); });
    output.sum().backward();
    EXPECT_EQ(when_reduced.back(), "unshard blocks.2");
    EXPECT_THAT(
        recorded_order(*model),
        ElementsAre("unshard the root", "unshard blocks.0", "unshard blocks.1", "unshard blocks.2",
                    "unshard blocks.2", "reduce blocks.2", "unshard blocks.1", "reduce blocks.1",
                    "unshard blocks.0", "reduce blocks.0", "reduce the root"));
  });
}

// Shows B21.
TEST(ExecutionOrderTest, ForwardPrefetchGathersTheNextUnitAheadOfTime) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = sharded(mesh, {.forward_prefetch = ForwardPrefetch::next});
    for (int step = 0; step < 3; ++step) {
      const ForwardScope scope(*model);
      const at::Tensor x = model->embedding->forward(some_ids());
      if (step == 0) {
        EXPECT_THAT(recorded_order(*model), Not(Contains("unshard blocks.0")));
      } else {
        EXPECT_THAT(recorded_order(*model), ElementsAre("unshard the root", "unshard blocks.0"));
      }
      at::Tensor y = x;
      for (const auto& block : *model->blocks) y = block->as<test::BlockImpl>()->forward(y);
      model->head->forward(model->norm->forward(y)).sum().backward();
    }
  });
}

// Shows B21.
TEST(ExecutionOrderTest, WhatWasGatheredInVainIsFreedWhenThePassDeviates) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = sharded(mesh, {.forward_prefetch = ForwardPrefetch::next});
    forward(model, some_ids()).sum().backward();
    ForwardScope scope(*model);
    const at::Tensor x = model->embedding->forward(some_ids());
    model->blocks[2]->as<test::BlockImpl>()->forward(x).sum().backward();
    for (const FlatParameterInfo& info : handles(*model)) {
      EXPECT_FALSE(info.module_fqn == "blocks.0" && info.is_unsharded);
    }
  });
}

class CountedEvent final : public fsdp::FreeEvent {
 public:
  explicit CountedEvent(std::vector<std::string>& waits, const test::TransformerImpl& model)
      : waits_(waits), model_(model) {}
  void synchronize() override {
    int num_open = 0;
    for (const FlatParameterInfo& info : handles(model_)) num_open += info.is_unsharded ? 1 : 0;
    waits_.push_back(std::to_string(num_open));
  }

 private:
  std::vector<std::string>& waits_;
  const test::TransformerImpl& model_;
};

// Shows B15.
TEST(ExecutionOrderTest, EachStreamHasAName) {
  const auto model = test::sharded_transformer({});
  EXPECT_TRUE(streams(*model).empty());  // a root has no streams before its first pass
  forward(model, test::some_ids()).sum().backward();
  std::vector<std::string> names;
  for (const NamedStream& named : streams(*model)) {
    names.push_back(named.name);
    EXPECT_EQ(named.stream, streams(*model).front().stream);  // the CPU has only one
  }
  EXPECT_THAT(names,
              ElementsAre("default", "unshard", "pre_unshard", "post_backward", "all_reduce"));
}

// Shows B14.
TEST(ExecutionOrderTest, TheHostWaitsForTheOldestOfTwoFreedUnitsBeforeItTakesMemory) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = sharded(mesh, {});
    std::vector<std::string> open_when_waiting;
    fsdp::Pass::of(*model)->set_rate_limiter(fsdp::RateLimiter(
        [&] { return std::make_unique<CountedEvent>(open_when_waiting, *model); }));
    for (int step = 0; step < 3; ++step) forward(model, some_ids()).sum().backward();
    // Each gather but the first ones waited once. At that time only the root, and at most the unit
    // that computed, were unsharded.
    EXPECT_GT(open_when_waiting.size(), 12U);
    EXPECT_THAT(open_when_waiting, ::testing::Each(::testing::AnyOf("0", "1", "2")));
  });
}

// Shows B14.
TEST(ExecutionOrderTest, TheLimiterWaitsInOrderAndOnlyWhenTwoAreOnTheirWay) {
  struct Event final : fsdp::FreeEvent {
    Event(std::vector<int>& waits, int number) : waits_(waits), number_(number) {}
    void synchronize() override { waits_.push_back(number_); }
    std::vector<int>& waits_;
    int number_;
  };
  std::vector<int> waits;
  int next = 0;
  fsdp::RateLimiter limiter([&] { return std::make_unique<Event>(waits, next++); });
  limiter.wait_for_room();
  limiter.note_freed();
  limiter.wait_for_room();
  EXPECT_THAT(waits, ElementsAre());
  limiter.note_freed();
  limiter.wait_for_room();
  EXPECT_THAT(waits, ElementsAre(0));
  limiter.wait_for_room();
  limiter.note_freed();
  limiter.note_freed();
  limiter.wait_for_room();
  limiter.wait_for_room();
  EXPECT_THAT(waits, ElementsAre(0, 1, 2));
}

// Shows B16.
TEST(ExecutionOrderTest, RecordsTheFirstForwardWithoutAProcessGroup) {
  for (const ShardingStrategy strategy : {FULL_SHARD, NO_SHARD}) {
    Transformer model = sharded(dist::Mesh(), {.strategy = strategy});
    EXPECT_TRUE(execution_info(*model).param_forward_order.empty());
    for (int step = 0; step < 2; ++step) forward(model, some_ids()).sum().backward();
    const ExecutionInfo info = execution_info(*model);
    EXPECT_THAT(info.module_forward_order, ElementsAre("", "blocks.0", "blocks.1", "blocks.2"));
    ASSERT_EQ(info.param_forward_order.size(), 3U + 3 * 6);
    EXPECT_EQ(info.param_forward_order[0], "embedding.weight");
    EXPECT_EQ(info.param_forward_order[1], "blocks.0.norm.weight");
    EXPECT_EQ(info.param_forward_order[20], "norm.bias");
    ASSERT_EQ(info.module_to_param_usage_infos.size(), 4U);
    EXPECT_THAT(info.module_to_param_usage_infos[0].params,
                ElementsAre("embedding.weight", "norm.weight", "norm.bias"));
    EXPECT_THAT(info.module_to_param_usage_infos[2].params,
                ElementsAre("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight",
                            "down.bias"));
  }
}

TEST(ExecutionOrderTest, ReshardAfterForwardCanBeSetPerModule) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Transformer model = sharded(mesh, {.backward_prefetch = BackwardPrefetch::none});
    set_reshard_after_forward(*model->blocks[1], false);
    for (int step = 0; step < 2; ++step) {
      forward(model, some_ids()).sum().backward();
      EXPECT_THAT(
          recorded_order(*model),
          ElementsAre("unshard the root", "unshard blocks.0", "unshard blocks.1",
                      "unshard blocks.2", "unshard blocks.2", "reduce blocks.2", "reduce blocks.1",
                      "unshard blocks.0", "reduce blocks.0", "reduce the root"));
    }
    EXPECT_THAT(test::error_of([&] { set_reshard_after_forward(*model->norm, true); }),
                ::testing::HasSubstr("fully sharded"));
  });
}

TEST(ExecutionOrderTest, TouchGathersForCodeThatReadsMemoryByItself) {
  for (const FreedParameters freed : {FreedParameters::freed, FreedParameters::poisoned}) {
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      Transformer model = sharded(mesh, {.freed_parameters = freed});
      Transformer unsharded = seeded<Transformer>();
      const at::NoGradGuard no_grad;
      for (int step = 0; step < 2; ++step) {
        const ForwardScope scope(*model);
        const at::Tensor& weight = model->blocks[1]->as<Block>()->up->weight;
        if (freed == FreedParameters::poisoned && step > 0) {
          EXPECT_TRUE(std::isnan(weight.data_ptr<float>()[0]));
        }
        touch(weight);
        const at::Tensor& expected = unsharded->blocks[1]->as<Block>()->up->weight;
        EXPECT_EQ(weight.data_ptr<float>()[7], expected.data_ptr<float>()[7]);
      }
      touch(torch::ones(2));
    });
  }
}

TEST(ExecutionOrderTest, FlatParamOfNamesTheUnit) {
  Transformer model = sharded(dist::Mesh(), {});
  forward(model, some_ids());
  const auto info = flat_param_of(model->blocks[1]->as<Block>()->up->weight);
  ASSERT_TRUE(info);
  EXPECT_EQ(info->module_fqn, "blocks.1");
  EXPECT_EQ(info->parameters[2].fqn, "up.weight");
  EXPECT_FALSE(flat_param_of(torch::ones(2)));
}

}  // namespace
}  // namespace tessera
