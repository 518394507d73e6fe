#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>

#include "accelerator/accelerator.h"
#include "runtime/support/checks.h"
#include "tessera/tessera.h"

namespace tessera {
namespace {

using test::accelerator::device;

class RecomputeOnDeviceTest : public test::AcceleratorTest {};

/// A layer whose dropout draws from the generator of the device.
struct DroppedImpl : torch::nn::Module {
  DroppedImpl() { layer = register_module("layer", torch::nn::Linear(16, 16)); }
  at::Tensor forward(const at::Tensor& x) {
    return torch::dropout(torch::gelu(layer->forward(x)), 0.3, is_training());
  }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Dropped);

struct NetImpl : torch::nn::Module {
  NetImpl() {
    for (int i = 0; i < 3; ++i) {
      layers.push_back(register_module("layer" + std::to_string(i), Dropped()));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const Dropped& layer : layers) {
      x = recomputation ? recompute(*recomputation, layer.ptr(), x) : layer.ptr()->forward(x);
    }
    return x;
  }
  std::optional<RecomputeOptions> recomputation;
  std::vector<Dropped> layers;
};
TORCH_MODULE(Net);

void seed(at::Device its_device) {
  at::Generator generator = at::globalContext().defaultGenerator(its_device);
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(11);
}

/// While this lives, the device's autocast computes in bfloat16.
class AutocastScope {
 public:
  AutocastScope() {
    at::autocast::set_autocast_enabled(device().type(), true);
    at::autocast::set_autocast_dtype(device().type(), at::kBFloat16);
    at::autocast::increment_nesting();
  }
  ~AutocastScope() {
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(device().type(), false);
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;
};

enum class Autocast { off, on };

/// Returns the whole gradients, by name, of one step on two ranks, or on one.
std::map<std::string, at::Tensor> gradients_with(std::optional<RecomputeOptions> recomputation,
                                                 Autocast autocast) {
  std::map<std::string, at::Tensor> found;
  test::on_devices(test::num_ranks(2), [&](const dist::Mesh& mesh) {
    const at::Device own = device(mesh.rank());
    Net net = test::seeded<Net>();
    net->recomputation = recomputation;
    net->to(own);
    fully_shard(*net, {.mesh = mesh, .policy = ModuleWrapPolicy<Dropped>()});
    const at::Tensor x = torch::linspace(-1, 1, 64).reshape({4, 16}).to(own);
    const at::Tensor input = x.requires_grad_();
    mesh.world()->max(0, "a barrier: seeding a model seeds all devices");
    seed(own);
    at::Tensor loss;
    {
      std::optional<AutocastScope> scope;
      if (autocast == Autocast::on) scope.emplace();
      loss = forward(net, input).to(torch::kFloat).square().sum();
    }
    loss.backward();
    const UnshardedParams whole(*net, {.writeback = false, .with_grads = true});
    if (mesh.rank() != 0) return;
    for (const auto& each : net->named_parameters()) {
      found[each.key()] = each.value().grad().cpu();
    }
  });
  return found;
}

TEST_P(RecomputeOnDeviceTest, GivesTheSameGradientsWithDropout) {
  for (const Autocast autocast : {Autocast::off, Autocast::on}) {
    SCOPED_TRACE(autocast == Autocast::on ? "with autocast" : "without autocast");
    const auto expected = gradients_with(std::nullopt, autocast);
    for (const auto way : {Recomputation::saved_tensors, Recomputation::reentrant}) {
      SCOPED_TRACE(way == Recomputation::reentrant ? "reentrant" : "saved tensors");
      const auto found = gradients_with(RecomputeOptions{.recomputation = way}, autocast);
      ASSERT_EQ(found.size(), 6U);
      for (const auto& [fqn, gradient] : expected) {
        EXPECT_TRUE(torch::allclose(found.at(fqn), gradient, 1e-5, 1e-6)) << fqn;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Modes, RecomputeOnDeviceTest,
                         ::testing::ValuesIn(test::accelerator::modes()), test::name_of_mode);

}  // namespace
}  // namespace tessera
