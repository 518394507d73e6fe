#include "runtime/optim/stepped_optimizers.h"

#include "runtime/state/optimizer_adapters.h"
#include "tessera/runtime/optim/fused_step.h"

namespace tessera::test {

namespace optim = torch::optim;

namespace {

template <class Optimizer, class Options>
OptimizerVariant variant(std::string name, const Options& options) {
  return {std::move(name),
          [options](std::vector<optim::OptimizerParamGroup> groups) {
            return std::make_unique<Optimizer>(std::move(groups), options);
          },
          [options] {
            auto other = std::make_unique<Options>(options);
            other->lr(options.lr() / 2);
            return other;
          },
          std::is_same_v<Optimizer, optim::SGD>};
}

at::Tensor numbers(at::IntArrayRef sizes, int seed) {
  std::int64_t numel = 1;
  for (const std::int64_t size : sizes) numel *= size;
  return torch::arange(numel, at::kDouble).add(1.7 * seed + 0.1).mul(12.9898).sin().reshape(sizes);
}

}  // namespace

std::vector<OptimizerVariant> optimizer_variants() {
  using optim::AdagradOptions;
  using optim::AdamOptions;
  using optim::AdamWOptions;
  using optim::SGDOptions;
  std::vector<OptimizerVariant> all;
  all.push_back(variant<optim::SGD>("Sgd", SGDOptions(0.1)));
  all.push_back(variant<optim::SGD>("SgdDecay", SGDOptions(0.1).weight_decay(0.1)));
  all.push_back(variant<optim::SGD>("SgdMomentum", SGDOptions(0.1).momentum(0.9)));
  all.push_back(variant<optim::SGD>(
      "SgdDampening", SGDOptions(0.1).momentum(0.9).dampening(0.3).weight_decay(0.1)));
  all.push_back(variant<optim::SGD>("SgdNesterov", SGDOptions(0.1).momentum(0.9).nesterov(true)));
  all.push_back(variant<optim::SGD>(
      "SgdNesterovDecay", SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.1)));
  for (const bool amsgrad : {false, true}) {
    for (const double decay : {0.0, 0.1}) {
      const std::string name = std::string(amsgrad ? "Amsgrad" : "") + (decay == 0 ? "" : "Decay");
      all.push_back(variant<optim::Adam>(
          "Adam" + name,
          AdamOptions(0.1).amsgrad(amsgrad).weight_decay(decay).betas({0.8, 0.95}).eps(1e-6)));
      all.push_back(variant<optim::AdamW>(
          "AdamW" + name,
          AdamWOptions(0.1).amsgrad(amsgrad).weight_decay(decay).betas({0.8, 0.95}).eps(1e-6)));
    }
  }
  all.push_back(variant<optim::AdamW>("AdamWDefaults", AdamWOptions()));
  all.push_back(variant<optim::Adagrad>("Adagrad", AdagradOptions(0.1)));
  all.push_back(variant<optim::Adagrad>(
      "AdagradAll",
      AdagradOptions(0.1).lr_decay(0.1).weight_decay(0.1).initial_accumulator_value(0.5).eps(
          1e-6)));
  return all;
}

SteppedOptimizer::SteppedOptimizer(const OptimizerVariant& variant, at::ScalarType dtype,
                                   at::Device device) {
  const auto placed = [&](const at::Tensor& tensor) { return tensor.to(device, dtype); };
  for (const at::Tensor& tensor : {
           placed(numbers({3, 5}, 0)), placed(numbers({7}, 1)), placed(numbers({}, 2)),
           placed(numbers({0, 4}, 3)), placed(numbers({130, 33}, 4)).t(),  // dense, columns first
           placed(numbers({4, 6}, 5)).slice(1, 0, 3),                      // with gaps
           placed(numbers({1}, 6)).expand({3}).clone(),                    // plain again
           numbers({5}, 7).to(device, at::kDouble),                        // of another dtype
           placed(numbers({2, 2}, 8)),                                     // never a gradient
       }) {
    parameters.push_back(tensor.detach().requires_grad_());
  }
  std::vector<optim::OptimizerParamGroup> groups;
  groups.emplace_back(std::vector<at::Tensor>(parameters.begin(), parameters.begin() + 5));
  groups.emplace_back(std::vector<at::Tensor>(parameters.begin() + 5, parameters.end()),
                      variant.other_options());
  optimizer = variant.make(std::move(groups));
}

void SteppedOptimizer::set_gradients(int step) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor& parameter = parameters[i];
    const auto number = static_cast<int>(i);
    if (i + 1 == parameters.size() || (i % 3 == 1 && step % 4 == number % 4)) {
      parameter.mutable_grad() = at::Tensor();
      continue;
    }
    at::Tensor gradient =
        torch::empty_strided(parameter.sizes(), parameter.strides(), parameter.options());
    // Sometimes in another order in memory than the parameter.
    if (step == 7) gradient = gradient.contiguous();
    // Far from 0: in half precision, squares of small numbers are 0, and Adam divides by them.
    const at::Tensor near = numbers(parameter.sizes(), 100 * step + number);
    gradient.copy_(near.sign().mul(0.5).add(near));
    parameter.mutable_grad() = gradient;
  }
}

void expect_equal_progress(const SteppedOptimizer& expected, const SteppedOptimizer& found,
                           double tolerance) {
  const auto& adapter = state::OptimizerAdapter::of(*expected.optimizer);
  const auto same = [&](const at::Tensor& a, const at::Tensor& b) {
    return a.defined() == b.defined() &&
           (!a.defined() || (a.dtype() == b.dtype() && a.strides() == b.strides() &&
                             torch::allclose(a.cpu(), b.cpu(), tolerance, tolerance)));
  };
  EXPECT_EQ(found.optimizer->state().size(), expected.optimizer->state().size());
  for (std::size_t i = 0; i < expected.parameters.size(); ++i) {
    SCOPED_TRACE("parameter " + std::to_string(i));
    EXPECT_TRUE(same(expected.parameters[i].detach(), found.parameters[i].detach()))
        << (expected.parameters[i] - found.parameters[i]).abs().max();
    const auto& of_expected = expected.optimizer->state();
    const auto& of_found = found.optimizer->state();
    const auto a = of_expected.find(expected.parameters[i].unsafeGetTensorImpl());
    const auto b = of_found.find(found.parameters[i].unsafeGetTensorImpl());
    ASSERT_EQ(a == of_expected.end(), b == of_found.end());
    if (a == of_expected.end()) continue;
    const auto& options = expected.optimizer->param_groups()[i < 5 ? 0 : 1].options();
    if (const std::int64_t* step = adapter.step(*a->second)) {
      EXPECT_EQ(*step, *adapter.step(*b->second));
    }
    const auto slots = adapter.slots(*a->second, options);
    for (std::size_t slot = 0; slot < slots.size(); ++slot) {
      EXPECT_TRUE(same(*slots[slot].tensor, *adapter.slots(*b->second, options)[slot].tensor))
          << slots[slot].name;
    }
  }
}

void expect_fused_steps_equal_own(const OptimizerVariant& variant, at::ScalarType dtype,
                                  at::Device device, int num_steps, double tolerance) {
  SteppedOptimizer own(variant, dtype, device);
  SteppedOptimizer fused(variant, dtype, device);
  SteppedOptimizer both(variant, dtype, device);
  for (int step = 0; step < num_steps; ++step) {
    SCOPED_TRACE("step " + std::to_string(step));
    for (SteppedOptimizer* each : {&own, &fused, &both}) each->set_gradients(step);
    const at::Tensor gradient = fused.parameters[0].grad().clone();
    own.optimizer->step();
    fused_step(*fused.optimizer);
    if (step / 3 % 2 == 0) {
      fused_step(*both.optimizer);
    } else {
      both.optimizer->step();
    }
    EXPECT_TRUE(fused.parameters[0].grad().equal(gradient));
    expect_equal_progress(own, fused, tolerance);
    expect_equal_progress(own, both, tolerance);
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace tessera::test
