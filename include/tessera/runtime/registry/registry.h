#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <typeindex>
#include <vector>

namespace tessera::registry {

/// What Tessera has applied to a module, kept beside it: the module itself is never changed, and a
/// lookup changes nothing either. One state of each type per module.
class ModuleState {
 public:
  virtual ~ModuleState() = default;
};

/// Returns a module's owner, which a state must not keep: a state that held its module would keep
/// both alive. Throws: Error(invalid_argument) where the module is not held by a shared_ptr.
std::weak_ptr<torch::nn::Module> weak_module(torch::nn::Module& module);

namespace detail {
std::shared_ptr<ModuleState> find(const torch::nn::Module& module, std::type_index type);
void attach(torch::nn::Module& module, std::type_index type, std::shared_ptr<ModuleState> state);
}  // namespace detail

/// Returns the state of that type, or nullptr. Thread-safe.
template <class State>
std::shared_ptr<State> find(const torch::nn::Module& module) {
  return std::static_pointer_cast<State>(detail::find(module, typeid(State)));
}

/// Keeps `state` for as long as the module lives, in place of an earlier one of its type. States of
/// modules that have died are let go with the next call. Thread-safe.
template <class State>
void attach(torch::nn::Module& module, std::shared_ptr<State> state) {
  detail::attach(module, typeid(State), std::move(state));
}

/// Returns how many modules have a state. Lets go of the states of modules that have died.
std::size_t num_modules();

}  // namespace tessera::registry
