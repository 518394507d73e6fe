#include <gmock/gmock.h>
#include <torch/torch.h>

#include <chrono>
#include <stdexcept>
#include <thread>

#include "runtime/support/checks.h"
#include "runtime/support/largest_pass.h"

namespace tessera {
namespace {

using test::error_of;
using test::Mlp;
using test::seeded;
using ::testing::AllOf;
using ::testing::HasSubstr;

at::Tensor rows_of(const at::Tensor& batch, const dist::Mesh& mesh) {
  return batch.chunk(mesh.world_size())[static_cast<std::size_t>(mesh.rank())];
}

at::Tensor some_batch() {
  return torch::linspace(-1, 1, 12 * 7).reshape({12, 7});
}

void expect_same_gradients(const torch::nn::Module& expected, const torch::nn::Module& found,
                           double factor = 1) {
  const auto parameters = found.named_parameters();
  for (const auto& parameter : expected.named_parameters()) {
    const at::Tensor& gradient = parameters[parameter.key()].grad();
    ASSERT_EQ(gradient.defined(), parameter.value().grad().defined()) << parameter.key();
    if (!gradient.defined()) continue;
    EXPECT_TRUE(torch::allclose(gradient, parameter.value().grad() * factor, 1e-5, 1e-7))
        << parameter.key();
  }
}

// Shows B8.
TEST(ReplicateTest, GradientsAreTheAverageOverTheRanks) {
  for (const std::int64_t bucket_nbytes : {1, 200, 1 << 20}) {
    test::on_ranks(3, [&](const dist::Mesh& mesh) {
      Mlp unsharded = seeded<Mlp>();
      Mlp model = seeded<Mlp>();
      replicate(*model, {.mesh = mesh, .bucket_nbytes = bucket_nbytes});
      for (int step = 0; step < 3; ++step) {
        unsharded->forward(some_batch()).mean().backward();
        model->forward(rows_of(some_batch(), mesh)).mean().backward();
        expect_same_gradients(*unsharded, *model);
      }
    });
  }
}

// Shows B8.
TEST(ReplicateTest, EachStepSendsEachGradientOnce) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    replicate(*model, {.mesh = mesh, .module_states = ReplicateOptions::ModuleStates::as_they_are});
    const std::uint64_t before = mesh.world()->traffic().all_reduce;
    model->forward(some_batch()).mean().backward();
    std::uint64_t num_elements = 6 + 2;  // flags: 6 parameters, 1 bucket, 1 for a failure
    for (const std::uint64_t numel : {7U * 13, 13U, 13U * 11, 11U, 11U * 3, 3U}) {
      num_elements += (numel + 3) / 4 * 4;  // gradients begin at multiples of 16 bytes
    }
    EXPECT_EQ(mesh.world()->traffic().all_reduce - before, num_elements * sizeof(float));
  });
}

// Shows B20.
TEST(ReplicateTest, StatesOfRankZeroAreSentOnce) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : model->parameters()) parameter.fill_(mesh.rank() + 1);
    }
    replicate(*model, {.mesh = mesh});
    for (const at::Tensor& parameter : model->parameters()) {
      EXPECT_TRUE(parameter.eq(1).all().item<bool>());
    }
    EXPECT_EQ(mesh.world()->traffic().broadcast,
              (7 * 13 + 13 + 13 * 11 + 11 + 11 * 3 + 3) * sizeof(float));
  });
}

// Shows B20.
TEST(ReplicateTest, IgnoredParametersAreNotSent) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : model->parameters()) parameter.fill_(mesh.rank() + 1);
    }
    model->down->bias.requires_grad_(false);
    replicate(*model, {.mesh = mesh, .ignored_states = {model->middle->weight, model->down->bias}});
    for (const auto& each : model->named_parameters()) {
      const bool is_ignored = each.key() == "middle.weight" || each.key() == "down.bias";
      EXPECT_TRUE(each.value().eq(is_ignored ? mesh.rank() + 1 : 1).all().item<bool>())
          << each.key();
    }
  });
}

// Gloo does not know all of these dtypes.
// Shows B20.
TEST(ReplicateTest, StatesOfEveryDtypeAreSent) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    torch::nn::Linear model(2, 2);
    const std::vector<at::ScalarType> dtypes = {at::kShort, at::kUInt16,        at::kFloat8_e5m2,
                                                at::kBool,  at::kFloat8_e4m3fn, at::kComplexFloat,
                                                at::kLong,  at::kComplexDouble};
    for (std::size_t i = 0; i < dtypes.size(); ++i) {
      const std::string name = std::to_string(i);
      const auto filled = [&](at::IntArrayRef sizes) {
        return torch::full(sizes, 1 - mesh.rank()).to(dtypes[i]);
      };
      model->register_buffer("scalar" + name, filled({}));
      model->register_buffer("empty" + name, filled({0, 2}));
      model->register_buffer("turned" + name, filled({2, 3}).t());
      model->register_parameter("frozen" + name, filled({3}), /*requires_grad=*/false);
    }
    model->register_buffer("conjugate",
                           torch::full({2}, c10::complex<double>(1, 1 + mesh.rank())).conj());
    replicate(*model, {.mesh = mesh});
    for (const at::Tensor& each : model->buffers()) {
      if (each.is_conj()) continue;
      EXPECT_TRUE(each.to(at::kComplexDouble).eq(1).all().item<bool>()) << each.dtype();
    }
    for (const auto& each : model->named_parameters()) {
      if (each.value().requires_grad()) continue;
      EXPECT_TRUE(each.value().to(at::kComplexDouble).eq(1).all().item<bool>()) << each.key();
    }
    EXPECT_TRUE(
        torch::imag(model->named_buffers()["conjugate"].resolve_conj()).eq(-1).all().item<bool>());
  });
}

// Shows B8.
TEST(ReplicateTest, AGradientThatSomebodyKeepsStaysAsItIs) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    replicate(*model, {.mesh = mesh});
    const auto backward = [&](double factor) {
      forward(model, rows_of(some_batch() * factor, mesh)).mean().backward();
      return model->up->weight.grad();
    };
    const at::Tensor kept = backward(1);
    const at::Tensor value = kept.clone();
    model->zero_grad();
    EXPECT_FALSE(torch::allclose(backward(3), value));
    EXPECT_TRUE(kept.equal(value));
  });
}

// Shows B8, B21. Under NoSyncScope, gradients are added up in the bucket that is averaged later.
TEST(ReplicateTest, AGradientThatSomebodyKeepsUnderNoSyncStaysAsItIs) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    replicate(*model, {.mesh = mesh});
    const auto backward = [&](double factor) {
      forward(model, rows_of(some_batch() * factor, mesh)).mean().backward();
    };
    std::vector<at::Tensor> kept;
    std::vector<at::Tensor> values;
    const auto keep = [&] {
      for (const at::Tensor& parameter : model->parameters()) {
        kept.push_back(parameter.grad().detach());
        values.push_back(parameter.grad().clone());
      }
      model->zero_grad();
    };
    backward(1);
    keep();
    for (int i = 0; i < 2; ++i) {
      const NoSyncScope no_sync(*model);
      backward(2 + i);
      keep();
    }
    backward(4);
    for (std::size_t i = 0; i < kept.size(); ++i) EXPECT_TRUE(kept[i].equal(values[i])) << i;
  });
}

// Shows B21.
TEST(ReplicateTest, BackwardsUnderNoSyncAddToOneMemory) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    replicate(*model, {.mesh = mesh});
    const auto backward = [&] { forward(model, rows_of(some_batch(), mesh)).mean().backward(); };
    const auto places = [&] {
      std::vector<const void*> found;
      for (const at::Tensor& parameter : model->parameters()) {
        found.push_back(parameter.grad().const_data_ptr());
      }
      return found;
    };
    backward();
    const std::vector<const void*> expected = places();
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      {
        const NoSyncScope no_sync(*model);
        backward();
        EXPECT_EQ(places(), expected);
        backward();
        EXPECT_EQ(places(), expected);
      }
      backward();
      EXPECT_EQ(places(), expected);
    }
  });
}

// Shows B21. After a NoSyncScope, a backward adds its gradients to the earlier ones and divides
// them in one loop, not with an operator for each.
TEST(ReplicateTest, GradientsAreAddedAndDividedInOnePass) {
  for (const int num_ranks : {2, 3}) {
    test::on_ranks(num_ranks, [](const dist::Mesh& mesh) {
      torch::nn::Linear model(64, 64);
      replicate(*model, {.mesh = mesh});
      const auto loss_of = [&](int backward) {
        return forward(model, torch::full({2, 64}, 0.1 + backward + mesh.rank())).sum();
      };
      loss_of(0).backward();
      model->zero_grad();
      {
        const NoSyncScope no_sync(*model);
        loss_of(1).backward();
        loss_of(2).backward();
      }
      const at::Tensor loss = loss_of(3);
      {
        const test::LargestPass largest;
        loss.backward();
        EXPECT_LT(largest.numel(), 64 * 64);
      }
      const double mean_rank = (mesh.world_size() - 1) / 2.0;
      const at::Tensor expected = torch::full({64, 64}, 2 * (0.3 + 1 + 2 + 3 + 3 * mean_rank));
      EXPECT_TRUE(torch::allclose(model->weight.grad(), expected));
      EXPECT_TRUE(model->bias.grad().eq(6).all().item<bool>());
    });
  }
}

// Shows B8, B21. Also gradients that the user keeps, and ones that the averaging backward does not
// use.
TEST(ReplicateTest, GradientsOfEarlierBackwardsAreAddedWhoeverKeepsThem) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    replicate(*model, {.mesh = mesh});
    const at::Tensor x = torch::ones({1, 7});
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      {
        const NoSyncScope no_sync(*model);
        ForwardScope scope(*model);
        const at::Tensor loss =
            model->up->forward(x).sum() + model->middle->forward(torch::ones({1, 13})).sum();
        scope.watch(loss);
        loss.backward();
      }
      const at::Tensor kept = model->up->bias.grad().detach();
      ForwardScope scope(*model);
      const at::Tensor loss = 2 * (mesh.rank() + 1) * model->up->forward(x).sum();
      scope.watch(loss);
      loss.backward();
      EXPECT_TRUE(kept.eq(1).all().item<bool>());
      EXPECT_TRUE(model->up->bias.grad().eq(4).all().item<bool>());
      EXPECT_TRUE(model->middle->bias.grad().eq(1).all().item<bool>());
      EXPECT_FALSE(model->down->bias.grad().defined());
    }
  });
}

// Shows B8.
TEST(ReplicateTest, GradientsCanBeZeroedInPlace) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp unsharded = seeded<Mlp>();
    Mlp model = seeded<Mlp>();
    replicate(*model, {.mesh = mesh});
    for (int step = 0; step < 3; ++step) {
      unsharded->zero_grad();
      unsharded->forward(some_batch()).mean().backward();
      model->zero_grad(/*set_to_none=*/false);
      forward(model, rows_of(some_batch(), mesh)).mean().backward();
      expect_same_gradients(*unsharded, *model);
    }
  });
}

// Shows B8.
TEST(ReplicateTest, GradientsLieAsTheirParametersDo) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    torch::nn::Conv2d convolution(torch::nn::Conv2dOptions(3, 4, 2));
    convolution->weight.set_data(convolution->weight.contiguous(at::MemoryFormat::ChannelsLast));
    replicate(*convolution, {.mesh = mesh});
    forward(convolution, torch::ones({1, 3, 2, 2}) * (mesh.rank() + 1)).sum().backward();
    EXPECT_EQ(convolution->weight.grad().strides(), convolution->weight.strides());
    EXPECT_TRUE(convolution->weight.grad().eq(1.5).all().item<bool>());
  });
}

// Shows B8.
TEST(ReplicateTest, AnAverageOfThreeIsRoundedInItsOwnDtype) {
  test::on_ranks(3, [](const dist::Mesh& mesh) {
    torch::nn::Linear linear(4, 1);
    linear->to(at::kDouble);
    replicate(*linear, {.mesh = mesh});
    forward(linear, torch::ones({1, 4}, at::kDouble) * (mesh.rank() + 0.1)).sum().backward();
    EXPECT_TRUE(
        torch::allclose(linear->weight.grad(), torch::full({1, 4}, 1.1, at::kDouble), 1e-14, 0));
  });
}

// Rank 0's backward fails while its all-reduces still wait for rank 1, and rank 0 continues.
// Shows B22.
TEST(ReplicateTest, ABackwardThatFailedLeavesNothingToTheNext) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp unsharded = seeded<Mlp>();
    Mlp model = seeded<Mlp>();
    replicate(*model, {.mesh = mesh, .bucket_nbytes = 1});
    bool fails = true;
    model->up->weight.register_hook([&](const at::Tensor& gradient) {
      if (fails) throw std::runtime_error("the user's own");
      return gradient;
    });
    const auto backward = [&](double factor) {
      forward(model, rows_of(some_batch() * factor, mesh)).mean().backward();
    };
    if (mesh.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
    EXPECT_THAT(error_of([&] { backward(100); }), HasSubstr("the user's own"));
    fails = false;
    model->zero_grad();
    unsharded->forward(some_batch()).mean().backward();
    backward(1);
    expect_same_gradients(*unsharded, *model);
  });
}

// Shows B22.
TEST(ReplicateTest, AGradientWithAGraphIsRefused) {
  Mlp model = seeded<Mlp>();
  replicate(*model);
  const at::Tensor loss = forward(model, some_batch()).mean();
  EXPECT_THAT(error_of([&] { loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true); }),
              HasSubstr("create_graph"));
}

// Shows B1.
TEST(ReplicateTest, AParameterWithoutMemoryIsRefusedAlsoIfItIsFrozen) {
  for (const bool is_frozen : {false, true}) {
    const auto model = std::make_shared<torch::nn::Module>("model");
    model->register_parameter("w", torch::empty({2}, at::kMeta), !is_frozen);
    EXPECT_THAT(error_of([&] { replicate(*model); }),
                HasSubstr("w: parameter for replicate: expected a leaf tensor with memory"));
  }
}

// Shows B1.
TEST(ReplicateTest, WhatWasFrozenCannotBeTrainedLater) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    model->up->weight.requires_grad_(false);
    model->down->register_parameter("never", torch::ones({2}), /*requires_grad=*/false);
    replicate(*model, {.mesh = mesh});
    const auto backward = [&] { forward(model, rows_of(some_batch(), mesh)).mean().backward(); };
    backward();
    model->up->bias.requires_grad_(false);
    backward();
    model->up->bias.requires_grad_(true);
    backward();
    model->up->weight.requires_grad_(true);
    EXPECT_THAT(error_of(backward), AllOf(HasSubstr("up.weight"), HasSubstr("frozen")));
  });
}

// Shows B8.
TEST(ReplicateTest, AModuleMayBeConvertedLater) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp unsharded = seeded<Mlp>();
    Mlp model = seeded<Mlp>();
    replicate(*model, {.mesh = mesh});
    forward(model, rows_of(some_batch(), mesh)).mean().backward();
    model->zero_grad();
    model->to(at::kDouble);
    unsharded->to(at::kDouble);
    unsharded->forward(some_batch().to(at::kDouble)).mean().backward();
    forward(model, rows_of(some_batch().to(at::kDouble), mesh)).mean().backward();
    expect_same_gradients(*unsharded, *model);
    EXPECT_EQ(model->up->weight.grad().scalar_type(), at::kDouble);
  });
}

// Shows B21.
TEST(ReplicateTest, WhatWasZeroedUnderNoSyncStaysUnused) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    replicate(*model, {.mesh = mesh});
    {
      const NoSyncScope no_sync(*model);
      forward(model, rows_of(some_batch(), mesh)).mean().backward();
    }
    model->zero_grad();
    model->up->forward(some_batch()).mean().backward();
    EXPECT_TRUE(model->up->weight.grad().defined());
    EXPECT_FALSE(model->down->weight.grad().defined());
  });
}

TEST(ReplicateTest, NoSyncHoldsTheAveragingBack) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp unsharded = seeded<Mlp>();
    Mlp model = seeded<Mlp>();
    replicate(*model, {.mesh = mesh});
    const auto step = [&] { forward(model, rows_of(some_batch(), mesh)).mean().backward(); };
    unsharded->forward(some_batch()).mean().backward();
    const std::uint64_t before = mesh.world()->traffic().all_reduce;
    {
      const NoSyncScope no_sync(*model);
      step();
      step();
    }
    EXPECT_EQ(mesh.world()->traffic().all_reduce, before);
    step();
    expect_same_gradients(*unsharded, *model, 3);
  });
}

// Shows B21.
TEST(ReplicateTest, NoSyncScopesNestAlsoOverAPartOfTheTree) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    replicate(*model->up, {.mesh = mesh});
    const auto num_sent = [&] { return mesh.world()->traffic().all_reduce; };
    const auto step = [&] { forward(model, rows_of(some_batch(), mesh)).mean().backward(); };
    const std::uint64_t before = num_sent();
    {
      const NoSyncScope outer(*model);
      { const NoSyncScope inner(*model->up); }
      step();
      EXPECT_EQ(num_sent(), before);
      replicate(*model->middle, {.mesh = mesh});
      step();
      EXPECT_EQ(num_sent(), before);
    }
    step();
    EXPECT_GT(num_sent(), before);
  });
}

// Shows B21.
TEST(ReplicateTest, NoSyncReachesWhatIsReplicatedAfterTheFirstForward) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    replicate(*model->up, {.mesh = mesh});
    const auto step = [&] { forward(model, rows_of(some_batch(), mesh)).mean().backward(); };
    step();
    replicate(*model->middle, {.mesh = mesh});
    const std::uint64_t before = mesh.world()->traffic().all_reduce;
    const NoSyncScope no_sync(*model);
    step();
    EXPECT_EQ(mesh.world()->traffic().all_reduce, before);
  });
}

// Shows B22.
TEST(ReplicateTest, APartThatWasReplacedOrAddedIsNamed) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    const auto error_after = [&](const auto& change) {
      Mlp model = seeded<Mlp>();
      const at::Tensor left_out = model->down->bias;
      replicate(*model, {.mesh = mesh, .ignored_states = {left_out}});
      forward(model, some_batch()).mean().backward();
      change(*model);
      return error_of([&] { forward(model, some_batch()); });
    };
    EXPECT_EQ(error_after([](auto&) {}), "none");
    EXPECT_THAT(error_after([](auto& model) {
                  model.up = model.replace_module("up", torch::nn::Linear(7, 13));
                }),
                HasSubstr("up.weight: parameter of a replicated module"));
    EXPECT_THAT(
        error_after([](auto& model) { model.register_module("added", torch::nn::Linear(2, 2)); }),
        HasSubstr("added.weight: parameter of a replicated module"));
    EXPECT_THAT(error_after([](auto& model) { model.unregister_module("up"); }),
                HasSubstr("up.bias: parameter of a replicated module"));
  });
}

TEST(ReplicateTest, ParametersThatOnlySomeRanksUse) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    replicate(*model, {.mesh = mesh, .bucket_nbytes = 1});
    for (int step = 1; step <= 2; ++step) {
      at::Tensor loss = model->up->forward(torch::ones({1, 7})).sum();
      if (mesh.rank() == 0) loss = loss + model->middle->forward(torch::ones({1, 13})).sum();
      loss.backward();
      EXPECT_FALSE(model->down->weight.grad().defined());
      EXPECT_TRUE(model->up->bias.grad().eq(step).all().item<bool>());
      EXPECT_TRUE(model->middle->bias.grad().eq(0.5 * step).all().item<bool>());
    }
  });
}

// Shows B19.
TEST(ReplicateTest, RecomputationInsideIt) {
  for (const Recomputation recomputation :
       {Recomputation::saved_tensors, Recomputation::reentrant}) {
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      Mlp unsharded = seeded<Mlp>();
      Mlp model = seeded<Mlp>();
      replicate(*model, {.mesh = mesh, .bucket_nbytes = 1});
      const auto twice = [](Mlp mlp, const at::Tensor& x) {
        return mlp->forward(x) + mlp->forward(x * 2);
      };
      for (int step = 0; step < 2; ++step) {
        twice(unsharded, some_batch()).mean().backward();
        const auto half = [&](double factor) {
          return recompute(
              {.recomputation = recomputation, .rng_state = RngState::leave},
              [=](const at::Tensor& x) mutable { return model->forward(x * factor); },
              rows_of(some_batch(), mesh));
        };
        (half(1) + half(2)).mean().backward();
        expect_same_gradients(*unsharded, *model);
      }
    });
  }
}

/// One rank recomputes a module twice in nested backwards, so that some gradients come after their
/// bucket's all-reduce has started. The other rank does not, and uses one more module.
/// Shows B10.
TEST(ReplicateTest, GradientsThatComeLateOnOneRankOnly) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    replicate(*model, {.mesh = mesh, .bucket_nbytes = 1});
    for (int step = 1; step <= 2; ++step) {
      ForwardScope scope(*model);
      const auto down = [&] {
        return recompute(
                   {.recomputation = Recomputation::reentrant, .rng_state = RngState::leave},
                   [&](const at::Tensor& x) { return model->down->forward(x); },
                   torch::ones({1, 11}, at::requires_grad()))
            .sum();
      };
      at::Tensor loss = down();
      if (mesh.rank() == 0) loss = loss + down();
      if (mesh.rank() == 1) loss = loss + model->up->forward(torch::ones({1, 7})).sum();
      scope.watch(loss);
      loss.backward();
      EXPECT_TRUE(model->down->bias.grad().eq(1.5 * step).all().item<bool>());
      EXPECT_TRUE(model->down->weight.grad().eq(1.5 * step).all().item<bool>());
      EXPECT_TRUE(model->up->bias.grad().eq(0.5 * step).all().item<bool>());
      EXPECT_FALSE(model->middle->weight.grad().defined());
    }
  });
}

TEST(ReplicateTest, BuffersFollowRankZero) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    torch::nn::BatchNorm1d norm(4);
    replicate(*norm, {.mesh = mesh});
    forward(norm, torch::randn({8, 4}) + mesh.rank()).sum().backward();
    const at::Tensor own = norm->running_mean.clone();
    forward(norm, torch::zeros({8, 4})).sum().backward();
    at::Tensor of_rank_zero = own.clone();
    mesh.world()->broadcast(of_rank_zero, 0, "expected").wait();
    EXPECT_TRUE(torch::allclose(norm->running_mean, of_rank_zero * 0.9));
  });
}

// Shows B8.
TEST(ReplicateTest, NestedInFullyShardItsSubtreeIsLeftAlone) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp unsharded = seeded<Mlp>();
    Mlp model = seeded<Mlp>();
    replicate(*model->middle, {.mesh = mesh});
    fully_shard(*model, {.mesh = mesh, .policy = ModuleWrapPolicy<torch::nn::Linear>()});
    EXPECT_EQ(model->middle->weight.dim(), 2);
    std::vector<std::string> units;
    for (const auto& [fqn, module] : fsdp_modules(*model)) units.push_back(fqn);
    EXPECT_THAT(units, ::testing::ElementsAre("", "up", "down"));
    for (int step = 1; step <= 2; ++step) {
      unsharded->forward(some_batch()).mean().backward();
      forward(model, rows_of(some_batch(), mesh)).mean().backward();
      test::expect_gradients_of(*unsharded, *model, mesh);
      EXPECT_TRUE(torch::allclose(model->middle->weight.grad(), unsharded->middle->weight.grad()));
    }
    const double expected = torch::nn::utils::clip_grad_norm_(unsharded->parameters(), 1e9);
    EXPECT_NEAR(clip_grad_norm_(*model, 1e9), expected, 1e-6);
    const NoSyncScope no_sync(*model);
    const at::Tensor before = model->middle->weight.grad().clone();
    forward(model, rows_of(some_batch(), mesh)).mean().backward();
    EXPECT_FALSE(model->middle->weight.grad().equal(before));
  });
}

// Shows B10.
TEST(ReplicateTest, ModulesThatARankDoesNotUseAtAll) {
  for (const ShardingStrategy strategy :
       {ShardingStrategy::full_shard, ShardingStrategy::no_shard}) {
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      Mlp model = seeded<Mlp>();
      replicate(*model->up, {.mesh = mesh});
      replicate(*model->middle, {.mesh = mesh});
      fully_shard(*model->down, {.mesh = mesh, .strategy = strategy});
      for (int step = 1; step <= 3; ++step) {
        ForwardScope scope(*model);
        at::Tensor loss = torch::ones({}, at::requires_grad());
        if (mesh.rank() == 0 || step == 2) {
          loss = loss + model->up->forward(torch::ones({1, 7})).sum();
        }
        if (mesh.rank() == 1) loss = loss + model->middle->forward(torch::ones({1, 13})).sum();
        if (step != 2) loss = loss + model->down->forward(torch::ones({1, 11})).sum();
        scope.watch(loss);
        loss.backward();
        const double up = step == 1 ? 0.5 : step == 2 ? 1.5 : 2;
        EXPECT_TRUE(model->up->bias.grad().eq(up).all().item<bool>());
        EXPECT_TRUE(model->middle->bias.grad().eq(0.5 * step).all().item<bool>());
      }
    });
  }
}

// Shows B10.
TEST(ReplicateTest, ModulesInAnotherOrderOnEachRank) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    torch::nn::Linear a(4, 4);
    torch::nn::Linear b(4, 4);
    replicate(*a, {.mesh = mesh});
    replicate(*b, {.mesh = mesh});
    const at::Tensor x = torch::ones({1, 4});
    for (int step = 1; step <= 2; ++step) {
      (mesh.rank() == 0 ? b(a(x)) : a(b(x))).sum().backward();
      at::Tensor of_other = a->weight.grad().clone();
      mesh.world()->broadcast(of_other, 0, "rank 0's").wait();
      EXPECT_TRUE(of_other.equal(a->weight.grad()));
    }
  });
}

// Shows B10.
TEST(ReplicateTest, TheOnlyOneOfATreeMayBeUnused) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    Mlp model = seeded<Mlp>();
    replicate(*model->up, {.mesh = mesh});
    for (int step = 1; step <= 2; ++step) {
      ForwardScope scope(*model);
      const at::Tensor x = torch::ones({1, 7}, at::requires_grad());
      const at::Tensor loss = mesh.rank() == 0 ? model->up->forward(x).sum() : (x * 2).sum();
      scope.watch(loss);
      loss.backward();
      EXPECT_TRUE(model->up->bias.grad().eq(0.5 * step).all().item<bool>());
    }
  });
}

// Shows B22.
TEST(ReplicateTest, ARankThatFailsInABackwardIsNamedToTheOthers) {
  for (const std::int64_t bucket_nbytes : {1, 1 << 20}) {
    test::on_ranks(2, [&](const dist::Mesh& mesh) {
      Mlp model = seeded<Mlp>();
      replicate(*model, {.mesh = mesh, .bucket_nbytes = bucket_nbytes});
      bool fails = false;
      model->middle->weight.register_hook([&](const at::Tensor& gradient) {
        if (fails) throw std::runtime_error("the user's own");
        return gradient;
      });
      for (int step = 0; step < 6; ++step) {
        Mlp unsharded = seeded<Mlp>();
        model->zero_grad();
        fails = step % 3 == 1 && mesh.rank() == 0;
        const at::Tensor batch = some_batch() * (step + 1);
        const std::string error =
            error_of([&] { forward(model, rows_of(batch, mesh)).mean().backward(); });
        if (step % 3 == 1) {
          EXPECT_THAT(error,
                      HasSubstr(mesh.rank() == 0 ? "the user's own" : "failed in the backward"));
          continue;
        }
        EXPECT_EQ(error, "none");
        unsharded->forward(batch).mean().backward();
        expect_same_gradients(*unsharded, *model);
      }
    });
  }
}

// Shows B8.
TEST(ReplicateTest, GradientsMayBeSwapped) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    torch::nn::Sequential layers(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    replicate(*layers, {.mesh = mesh});
    const auto backward = [&](double factor) {
      const at::Tensor x = torch::full({1, 4}, factor);
      (layers[0]->as<torch::nn::Linear>()->forward(x).sum() +
       2 * layers[1]->as<torch::nn::Linear>()->forward(x).sum())
          .backward();
    };
    at::Tensor first = layers[0]->as<torch::nn::Linear>()->weight;
    at::Tensor second = layers[1]->as<torch::nn::Linear>()->weight;
    backward(1);
    std::swap(first.mutable_grad(), second.mutable_grad());
    backward(10);
    EXPECT_TRUE(first.grad().eq(2 + 10).all().item<bool>());
    EXPECT_TRUE(second.grad().eq(1 + 20).all().item<bool>());
  });
}

// Shows B22.
TEST(ReplicateTest, RanksWithOtherParametersAreTold) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    torch::nn::Linear wide(4, 4 + mesh.rank());
    EXPECT_THAT(error_of([&] { replicate(*wide, {.mesh = mesh}); }),
                AllOf(HasSubstr("weight (Float, [4, 4]) on rank 0"),
                      HasSubstr("weight (Float, [5, 4]) on rank 1")));
    Mlp frozen = seeded<Mlp>();
    (mesh.rank() == 0 ? frozen->up : frozen->down)->bias.requires_grad_(false);
    EXPECT_THAT(error_of([&] { replicate(*frozen, {.mesh = mesh}); }), HasSubstr("up.bias"));
    Mlp turned = seeded<Mlp>();
    if (mesh.rank() == 1) turned->up->weight.set_data(turned->up->weight.t().contiguous().t());
    EXPECT_THAT(error_of([&] { replicate(*turned, {.mesh = mesh}); }),
                AllOf(HasSubstr("up.weight (Float, "), HasSubstr("], strides 1 ")));
    torch::nn::Sequential layers(torch::nn::Linear(2, 2));
    for (const at::Tensor& parameter : layers->parameters()) parameter.requires_grad_(false);
    if (mesh.rank() == 0) {
      layers->register_parameter("extra", torch::ones({2, 2}), /*requires_grad=*/false);
    }
    EXPECT_THAT(error_of([&] { replicate(*layers, {.mesh = mesh}); }),
                AllOf(HasSubstr("extra (Float, [2, 2], frozen) on rank 0"),
                      HasSubstr("0.weight (Float, [2, 2], frozen) on rank 1")));
    torch::nn::BatchNorm1d norm(torch::nn::BatchNorm1dOptions(3).affine(false));
    norm->running_mean.resize_({3 + mesh.rank()});
    EXPECT_THAT(error_of([&] { replicate(*norm, {.mesh = mesh}); }),
                HasSubstr("running_mean (Float, [4]) on rank 1"));
    Mlp same = seeded<Mlp>();
    EXPECT_THAT(
        error_of([&] { replicate(*same, {.mesh = mesh, .bucket_nbytes = 100 + mesh.rank()}); }),
        HasSubstr("buckets of 101 bytes on rank 1"));
    replicate(*same, {.mesh = mesh});
  });
}

// Shows B8.
TEST(ReplicateTest, APartOfAModuleMayBeConverted) {
  test::on_ranks(2, [](const dist::Mesh& mesh) {
    torch::nn::Linear first(4, 4);
    torch::nn::Linear second(4, 4);
    torch::nn::Sequential layers(first, second);
    replicate(*layers, {.mesh = mesh});
    second->to(at::kHalf);
    const at::Tensor x = torch::full({1, 4}, 1e5);
    for (int step = 1; step <= 2; ++step) {
      (first(x).sum() + second(torch::ones({1, 4}, at::kHalf)).sum()).backward();
      EXPECT_TRUE(first->weight.grad().eq(step * 1e5).all().item<bool>());
      EXPECT_EQ(second->weight.grad().scalar_type(), at::kHalf);
      EXPECT_TRUE(second->weight.grad().eq(step).all().item<bool>());
    }
    layers->zero_grad();
    first->bias.set_data(torch::ones({8}));
    EXPECT_THAT(error_of([&] { first->bias.sum().backward(); }),
                AllOf(HasSubstr("bias"), HasSubstr("4 elements"), HasSubstr("8")));
  });
}

// Shows B9.
TEST(ReplicateTest, WhatIsAppliedAlreadyIsNamed) {
  Mlp model;
  EXPECT_FALSE(registry::applied_api(*model));
  fully_shard(*model->middle);
  EXPECT_EQ(registry::applied_api(*model->middle), "fully_shard");
  EXPECT_THAT(error_of([&] { replicate(*model); }),
              HasSubstr("middle: replicate: expected a module that is not sharded or replicated "
                        "yet, found a module that fully_shard was applied to"));
  replicate(*model->up);
  EXPECT_THAT(error_of([&] { fully_shard(*model->up); }),
              HasSubstr("a module that replicate was applied to"));
  EXPECT_FALSE(registry::applied_api(*model));
}

}  // namespace
}  // namespace tessera
