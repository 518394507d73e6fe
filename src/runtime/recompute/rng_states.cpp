#include "runtime/recompute/rng_states.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <algorithm>
#include <mutex>

namespace tessera {
namespace {

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

}  // namespace

RngStates RngStates::of_devices(const std::vector<at::Tensor>& tensors) {
  RngStates states;
  const at::Generator cpu = at::detail::getDefaultCPUGenerator();
  states.states_.emplace_back(cpu, state_of(cpu));
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.device().is_cpu() || tensor.is_meta()) continue;
    const at::Generator generator = at::globalContext().defaultGenerator(tensor.device());
    const bool is_new = std::ranges::none_of(
        states.states_, [&](const auto& each) { return each.first == generator; });
    if (is_new) states.states_.emplace_back(generator, state_of(generator));
  }
  return states;
}

RngStates RngStates::exchange() const {
  RngStates before;
  for (const auto& [shared, state] : states_) {
    at::Generator generator = shared;
    const std::lock_guard lock(generator.mutex());
    before.states_.emplace_back(generator, generator.get_state());
    generator.set_state(state);
  }
  return before;
}

}  // namespace tessera
