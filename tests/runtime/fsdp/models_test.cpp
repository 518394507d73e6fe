#include <gtest/gtest.h>
#include <torch/torch.h>

#include "runtime/support/checks.h"

namespace tessera {
namespace {

/// A model of some kind, its units, and a loss. Every rank trains on the same rows, so that batch
/// statistics are those of the unsharded run too.
class Subject {
 public:
  virtual ~Subject() = default;
  virtual torch::nn::Module& module() = 0;
  virtual at::Tensor input() const = 0;
  virtual at::Tensor loss(const at::Tensor& x) = 0;
  virtual AnyFsdpPolicy policy() const { return ModuleWrapPolicy<torch::nn::Linear>(); }
};

class MlpSubject final : public Subject {
 public:
  torch::nn::Module& module() override { return *model_; }
  at::Tensor input() const override { return torch::linspace(-1, 1, 35).reshape({5, 7}); }
  at::Tensor loss(const at::Tensor& x) override { return model_->forward(x).pow(2).mean(); }

 private:
  test::Mlp model_;
};

/// Convolutions with BatchNorm, whose buffers move along.
class ConvolutionSubject final : public Subject {
 public:
  torch::nn::Module& module() override { return *model_; }
  at::Tensor input() const override {
    return torch::sin(torch::arange(200) * 1.7).reshape({2, 1, 10, 10});
  }
  at::Tensor loss(const at::Tensor& x) override { return model_->forward(x).pow(2).mean(); }
  AnyFsdpPolicy policy() const override {
    return ModuleWrapPolicy<torch::nn::Conv2d, torch::nn::BatchNorm2d>();
  }

 private:
  torch::nn::Sequential model_{torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 3, 3).bias(false)),
                               torch::nn::BatchNorm2d(3),
                               torch::nn::ReLU(),
                               torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 5, 3).bias(false)),
                               torch::nn::BatchNorm2d(5),
                               torch::nn::Flatten(),
                               torch::nn::Linear(5 * 36, 3)};
};

struct TaggerImpl : torch::nn::Module {
  TaggerImpl() {
    lstm = register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(4, 6).num_layers(2)));
    out = register_module("out", torch::nn::Linear(6, 3));
  }
  at::Tensor forward(const at::Tensor& x) { return out->forward(std::get<0>(lstm->forward(x))); }
  torch::nn::LSTM lstm{nullptr};
  torch::nn::Linear out{nullptr};
};
TORCH_MODULE(Tagger);

class LstmSubject final : public Subject {
 public:
  torch::nn::Module& module() override { return *model_; }
  at::Tensor input() const override { return torch::linspace(-1, 1, 60).reshape({5, 3, 4}); }
  at::Tensor loss(const at::Tensor& x) override { return model_->forward(x).pow(2).mean(); }
  AnyFsdpPolicy policy() const override {
    return ModuleWrapPolicy<torch::nn::LSTM, torch::nn::Linear>();
  }

 private:
  Tagger model_;
};

/// A whole unit is frozen.
class FrozenSubject final : public Subject {
 public:
  FrozenSubject() {
    for (at::Tensor& parameter : model_->middle->parameters()) parameter.requires_grad_(false);
  }
  torch::nn::Module& module() override { return *model_; }
  at::Tensor input() const override { return torch::linspace(-1, 1, 35).reshape({5, 7}); }
  at::Tensor loss(const at::Tensor& x) override { return model_->forward(x).pow(2).mean(); }

 private:
  test::Mlp model_;
};

enum class Kind { mlp, convolution, lstm, frozen };

std::unique_ptr<Subject> make(Kind kind) {
  std::unique_ptr<Subject> subject;
  test::with_generator([&] {
    torch::manual_seed(11);
    switch (kind) {
      case Kind::mlp:
        subject = std::make_unique<MlpSubject>();
        break;
      case Kind::convolution:
        subject = std::make_unique<ConvolutionSubject>();
        break;
      case Kind::lstm:
        subject = std::make_unique<LstmSubject>();
        break;
      case Kind::frozen:
        subject = std::make_unique<FrozenSubject>();
        break;
    }
  });
  return subject;
}

enum class Way { plain, recompute, accumulate, accumulate_no_sync };
constexpr std::size_t kNumSteps = 4;

/// What a run leaves.
struct Outcome {
  std::vector<double> losses;
  std::map<std::string, at::Tensor> tensors;  // parameters and buffers
};

void take_tensors(Outcome& outcome, const torch::nn::Module& module) {
  for (const auto& each : module.named_parameters()) {
    outcome.tensors[each.key()] = each.value().detach().to(torch::kDouble).clone();
  }
  for (const auto& each : module.named_buffers()) {
    outcome.tensors[each.key()] = each.value().detach().to(torch::kDouble).clone();
  }
}

torch::optim::AdamWOptions optimizer_options() {
  return torch::optim::AdamWOptions(0.01);
}

std::size_t num_backwards(Way way) {
  return way == Way::accumulate || way == Way::accumulate_no_sync ? 2 : 1;
}

Outcome train_unsharded(Kind kind, Way way) {
  const auto subject = make(kind);
  torch::optim::AdamW optimizer(subject->module().parameters(), optimizer_options());
  Outcome outcome;
  for (std::size_t step = 0; step < kNumSteps; ++step) {
    optimizer.zero_grad();
    for (std::size_t i = 0; i < num_backwards(way); ++i) {
      const at::Tensor loss = subject->loss(subject->input() * static_cast<double>(i + 1));
      loss.backward();
      outcome.losses.push_back(loss.item<double>());
    }
    optimizer.step();
  }
  take_tensors(outcome, subject->module());
  return outcome;
}

Outcome train_sharded(Kind kind, Way way, const dist::Mesh& mesh, ShardingStrategy strategy,
                      const MixedPrecision& precision = {}) {
  const auto subject = make(kind);
  torch::nn::Module& module = subject->module();
  fully_shard(module, {.mesh = mesh,
                       .policy = subject->policy(),
                       .strategy = strategy,
                       .mixed_precision = precision});
  torch::optim::AdamW optimizer(module.parameters(), optimizer_options());
  Outcome outcome;
  for (std::size_t step = 0; step < kNumSteps; ++step) {
    optimizer.zero_grad();
    for (std::size_t i = 0; i < num_backwards(way); ++i) {
      std::optional<NoSyncScope> no_sync;
      if (way == Way::accumulate_no_sync && i == 0) no_sync.emplace(module);
      at::Tensor loss;
      {
        ForwardScope scope(module);
        const at::Tensor x = scope.cast_input(subject->input() * static_cast<double>(i + 1));
        loss =
            way == Way::recompute
                ? recompute(
                      {.rng_state = RngState::leave},  // ranks that are threads share one generator
                      [&](const at::Tensor& input) { return subject->loss(input); }, x)
                : subject->loss(x);
        scope.watch(loss);
      }
      loss.backward();
      outcome.losses.push_back(loss.item<double>());
    }
    optimizer.step();
  }
  const at::NoGradGuard no_grad;
  const ForwardScope scope(module);
  take_tensors(outcome, module);
  return outcome;
}

void expect_same_outcome(const Outcome& found, const Outcome& expected, double tolerance) {
  ASSERT_EQ(found.losses.size(), expected.losses.size());
  for (std::size_t i = 0; i < found.losses.size(); ++i) {
    EXPECT_NEAR(found.losses[i], expected.losses[i], tolerance) << "loss " << i;
  }
  ASSERT_EQ(found.tensors.size(), expected.tensors.size());
  for (const auto& [fqn, tensor] : expected.tensors) {
    ASSERT_EQ(found.tensors.at(fqn).sizes(), tensor.sizes()) << fqn;
    EXPECT_LE((found.tensors.at(fqn) - tensor).abs().max().item<double>(), tolerance) << fqn;
  }
}

class ModelsTest : public ::testing::TestWithParam<std::tuple<Kind, ShardingStrategy>> {};

TEST_P(ModelsTest, B1_B10_B19_EqualTheUnshardedRun) {
  const auto [kind, strategy] = GetParam();
  for (const Way way : {Way::plain, Way::recompute, Way::accumulate, Way::accumulate_no_sync}) {
    const bool has_batch_statistics = kind == Kind::convolution;
    if (way == Way::recompute && has_batch_statistics)
      continue;  // a second call updates them twice
    const Outcome expected = train_unsharded(kind, way);
    for (const int world_size : {1, 2, 3, 4}) {
      test::on_ranks(world_size, [&, kind = kind, strategy = strategy](const dist::Mesh& mesh) {
        SCOPED_TRACE("way " + std::to_string(static_cast<int>(way)) + " on " +
                     std::to_string(world_size) + " ranks");
        expect_same_outcome(train_sharded(kind, way, mesh, strategy), expected, 5e-5);
      });
    }
  }
}

TEST_P(ModelsTest, B11_BFloat16IsTheSameOnAnyNumberOfRanks) {
  const auto [kind, strategy] = GetParam();
  const MixedPrecision precision{.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  if (kind == Kind::convolution)
    return;  // its buffers stay float32, which BatchNorm refuses to mix
  const Outcome expected = train_sharded(kind, Way::plain, dist::Mesh(), strategy, precision);
  const Outcome in_float = train_unsharded(kind, Way::plain);
  for (std::size_t i = 0; i < expected.losses.size(); ++i) {
    EXPECT_NEAR(expected.losses[i], in_float.losses[i], 0.02) << i;
  }
  for (const int world_size : {2, 3, 4}) {
    test::on_ranks(world_size, [&, kind = kind, strategy = strategy](const dist::Mesh& mesh) {
      expect_same_outcome(train_sharded(kind, Way::plain, mesh, strategy, precision), expected,
                          1e-3);
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    KindsAndStrategies, ModelsTest,
    ::testing::Combine(::testing::Values(Kind::mlp, Kind::convolution, Kind::lstm, Kind::frozen),
                       ::testing::Values(FULL_SHARD, SHARD_GRAD_OP, NO_SHARD)));

}  // namespace
}  // namespace tessera
