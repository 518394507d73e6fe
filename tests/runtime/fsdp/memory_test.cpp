#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <functional>
#include <thread>

#include "runtime/support/checks.h"
#include "runtime/support/counting_allocator.h"

namespace tessera {
namespace {

using test::allocated_memory;

/// Layers whose parameters are much larger than all activations.
struct DeepImpl : torch::nn::Module {
  static constexpr std::int64_t kWidth = 128;
  static constexpr std::int64_t kNumLayers = 16;
  static constexpr std::int64_t kLayerNbytes = (kWidth * kWidth + kWidth) * 4;
  DeepImpl() {
    for (std::int64_t i = 0; i < kNumLayers; ++i) {
      layers.push_back(
          register_module("layer" + std::to_string(i), torch::nn::Linear(kWidth, kWidth)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = torch::tanh(layer->forward(x));
    return x;
  }
  /// Uses only the layers that `is_used` names.
  at::Tensor forward(at::Tensor x, const std::function<bool(std::int64_t)>& is_used) {
    for (std::int64_t i = 0; i < kNumLayers; ++i) {
      if (is_used(i)) x = torch::tanh(layers[static_cast<std::size_t>(i)]->forward(x));
    }
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Deep);

constexpr std::int64_t kActivationNbytes = 64 << 10;  // of one row, and other small tensors

Deep sharded_deep(const dist::Mesh& mesh, const FullyShardOptions& options) {
  Deep model = test::seeded<Deep>();
  FullyShardOptions with_mesh = options;
  with_mesh.mesh = mesh;
  with_mesh.policy = ModuleWrapPolicy<torch::nn::Linear>();
  fully_shard(*model, with_mesh);
  return model;
}

TEST(MemoryTest, BetweenPassesARankHoldsItsPart) {
  test::on_ranks(4, [](const dist::Mesh& mesh) {
    const std::int64_t before = allocated_memory().now;
    const Deep model = sharded_deep(mesh, {});
    const std::int64_t whole = DeepImpl::kNumLayers * DeepImpl::kLayerNbytes;
    EXPECT_LE(allocated_memory().now - before, whole / 4 + kActivationNbytes);
    EXPECT_GE(allocated_memory().now - before, whole / 4);
  });
}

/// Peaks of a step. A rank holds its shards, and three units: one that computes, one gathered
/// ahead, one about to be freed. In the backward it also holds autograd's gradient, the flat
/// gradient of the layer, and the one in reduction. At the end it holds all reduced gradients.
/// Shows B14.
TEST(MemoryTest, AStepHoldsAFewUnitsAtATime) {
  for (const BackwardPrefetch prefetch : {BackwardPrefetch::none, BACKWARD_POST, BACKWARD_PRE}) {
    test::on_ranks(4, [&](const dist::Mesh& mesh) {
      Deep model = sharded_deep(mesh, {.backward_prefetch = prefetch});
      const at::Tensor x = torch::ones({1, DeepImpl::kWidth});
      const std::int64_t shard = DeepImpl::kNumLayers * DeepImpl::kLayerNbytes / 4;
      for (int step = 0; step < 4; ++step) {
        for (at::Tensor& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
        const std::int64_t before = allocated_memory().now;
        test::reset_peak();
        const at::Tensor loss = forward(model, x).sum();
        const std::int64_t forward_peak = allocated_memory().peak - before;
        EXPECT_LE(forward_peak, 2 * DeepImpl::kLayerNbytes + kActivationNbytes) << step;
        test::reset_peak();
        loss.backward();
        const std::int64_t backward_peak = allocated_memory().peak - before;
        const std::int64_t units = prefetch == BACKWARD_PRE ? 2 : 1;
        EXPECT_LE(backward_peak,
                  units * DeepImpl::kLayerNbytes    // parameters
                      + 3 * DeepImpl::kLayerNbytes  // gradients: autograd's, flat, one in reduction
                      + DeepImpl::kLayerNbytes      // Gloo's copy of the one in reduction
                      + shard                       // reduced gradients
                      + kActivationNbytes)
            << step;
        EXPECT_LT(backward_peak, DeepImpl::kNumLayers * DeepImpl::kLayerNbytes) << step;
      }
    });
  }
}

/// Peaks of a step in which ranks use different layers. A rank joins the gathers of a layer that it
/// does not use, and holds that one layer meanwhile. In the backward at most one layer's gradient
/// waits for its turn.
/// Shows B10, B14.
TEST(MemoryTest, RanksThatUseDifferentUnitsHoldTwoUnitsMore) {
  test::on_ranks(4, [](const dist::Mesh& mesh) {
    Deep model = sharded_deep(mesh, {});
    const at::Tensor x = torch::ones({1, DeepImpl::kWidth}, torch::requires_grad());
    const std::int64_t layer = DeepImpl::kLayerNbytes;
    const std::int64_t shard = DeepImpl::kNumLayers * layer / 4;
    for (int step = 0; step < 8; ++step) {
      // Each layer but the last is used by one or two of the ranks, by others in each step.
      const auto is_used = [&](std::int64_t i) {
        return i + 1 == DeepImpl::kNumLayers || (i + step) % 4 == mesh.rank() ||
               (i * 3 + step) % 5 == mesh.rank();
      };
      for (at::Tensor& parameter : model->parameters()) parameter.mutable_grad() = at::Tensor();
      const std::int64_t before = allocated_memory().now;
      test::reset_peak();
      const at::Tensor loss = forward(model, x, is_used).sum();
      EXPECT_LE(allocated_memory().peak - before, 3 * layer + kActivationNbytes) << step;
      test::reset_peak();
      loss.backward();
      EXPECT_LE(allocated_memory().peak - before,
                3 * layer        // parameters: computing, prefetched, gathered for other ranks
                    + 4 * layer  // gradients: autograd's, flat, waiting, in reduction
                    + layer      // Gloo's copy of the one in reduction
                    + shard      // reduced gradients
                    + kActivationNbytes)
          << step;
    }
  });
}

/// Peaks of a step that accumulates gradients. Under NoSyncScope parameters stay gathered until the
/// backward, which frees them as it makes unsharded gradients, one unit at a time. So the first
/// pass takes the memory of one whole model; so does the second, which adds to these gradients.
TEST(MemoryTest, AccumulatedGradientsTakeTheMemoryOfOneModel) {
  test::on_ranks(4, [](const dist::Mesh& mesh) {
    static_cast<void>(allocated_memory());  // counts from here on
    Deep model = sharded_deep(mesh, {});
    const at::Tensor x = torch::ones({1, DeepImpl::kWidth});
    const std::int64_t whole = DeepImpl::kNumLayers * DeepImpl::kLayerNbytes;
    const std::int64_t shard = whole / 4;
    const std::int64_t few_layers = 7 * DeepImpl::kLayerNbytes;  // as in a step with one backward
    forward(model, x).sum().backward();  // after it Gloo has freed its copies of the model
    model->zero_grad();
    const std::int64_t before = allocated_memory().now;
    const auto step = [&] {
      test::reset_peak();
      {
        const NoSyncScope no_sync(*model);
        forward(model, x).sum().backward();
      }
      const std::int64_t first_peak = allocated_memory().peak - before;
      EXPECT_LE(first_peak, whole + few_layers + kActivationNbytes);
      test::reset_peak();
      forward(model, x).sum().backward();
      const std::int64_t second_peak = allocated_memory().peak - before;
      EXPECT_LE(second_peak, whole + shard + few_layers + kActivationNbytes);
      model->zero_grad();
    };
    for (int i = 0; i < 3; ++i) step();
    EXPECT_LE(allocated_memory().now - before, whole + few_layers + kActivationNbytes)
        << "kept for the next step that accumulates";
    EXPECT_GE(allocated_memory().now - before, whole);
    forward(model, x).sum().backward();  // a step that accumulates nothing
    model->zero_grad();
    EXPECT_LE(allocated_memory().now - before, kActivationNbytes);
    step();
    drop_unsynced_gradients(*model);
    EXPECT_LE(allocated_memory().now - before, kActivationNbytes);
  });
}

TEST(MemoryTest, NoShardUsesTheMemoryOfTheLastGradientsAgain) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Deep model = sharded_deep(mesh, {.strategy = NO_SHARD});
    const auto backward = [&](float scale) {
      (forward(model, torch::ones({1, DeepImpl::kWidth})).sum() * scale).backward();
      return model->layers.front()->weight.grad();
    };
    const void* const memory = backward(1).const_data_ptr();
    model->zero_grad();
    at::Tensor kept = backward(1);
    EXPECT_EQ(kept.const_data_ptr(), memory);
    const at::Tensor value = kept.clone();
    model->zero_grad();
    EXPECT_NE(backward(2).const_data_ptr(), memory) << "somebody keeps the gradient";
    EXPECT_TRUE(kept.equal(value));
    kept = at::Tensor();
    EXPECT_TRUE(backward(1).equal(value * 3)) << "added to the gradient of the backward before";
    model->zero_grad();
    EXPECT_EQ(backward(1).const_data_ptr(), memory);
  });
}

TEST(MemoryTest, NothingGrowsOverTwoHundredSteps) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Deep model = sharded_deep(mesh, {});
    torch::optim::AdamW optimizer(model->parameters());
    std::int64_t early = 0;  // most memory after one of the first 50 steps
    for (int step = 0; step < 200; ++step) {
      {
        const at::Tensor output = forward(model, torch::ones({1, DeepImpl::kWidth}));
        output.sum().backward();
      }
      optimizer.step();
      optimizer.zero_grad();
      if (step % 7 == 0) {
        const at::NoGradGuard no_grad;
        static_cast<void>(forward(model, torch::ones({1, DeepImpl::kWidth})));
      }
      if (step < 50) early = std::max(early, allocated_memory().now);
    }
    for (int wait = 0; wait < 200 && allocated_memory().now > early; ++wait) {
      std::this_thread::sleep_for(std::chrono::milliseconds(10));  // Gloo's threads free late
    }
    EXPECT_LE(allocated_memory().now, early);
  });
}

// Shows B9.
TEST(MemoryTest, ADeadModuleLeavesNothing) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    const std::int64_t before = allocated_memory().now;
    for (int i = 0; i < 3; ++i) {
      Deep model = sharded_deep(mesh, {});
      forward(model, torch::ones({1, DeepImpl::kWidth})).sum().backward();
    }
    // The next access to the registry frees the states of dead modules. Gloo's threads, and the
    // other rank's access, may still be freeing.
    for (int i = 0; i < 500 && allocated_memory().now != before; ++i) {
      registry::num_modules();
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    EXPECT_EQ(allocated_memory().now, before);
  });
}

}  // namespace
}  // namespace tessera
