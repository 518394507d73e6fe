#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <typeindex>
#include <vector>

#include "tessera/runtime/dist/mesh.h"

namespace tessera::registry {

/// Base class of what Tessera stores about a module, in a table outside of the module: storing or
/// finding a state does not change the module. A module has at most one state of each type.
class ModuleState {
 public:
  virtual ~ModuleState() = default;
};

/// Returns a weak pointer to a module. A state must refer to its module by this pointer: a
/// shared_ptr would keep module and state alive forever. Throws: Error(invalid_argument) if no
/// shared_ptr holds the module.
std::weak_ptr<torch::nn::Module> weak_module(torch::nn::Module& module);

namespace detail {
std::shared_ptr<ModuleState> find(const torch::nn::Module& module, std::type_index type);
void attach(torch::nn::Module& module, std::type_index type, std::shared_ptr<ModuleState> state);
}  // namespace detail

/// Returns the module's state of type `State`; nullptr if it has none. Thread-safe.
template <class State>
std::shared_ptr<State> find(const torch::nn::Module& module) {
  return std::static_pointer_cast<State>(detail::find(module, typeid(State)));
}

/// Stores `state` for a module, in place of one of this type. Frees states of dead modules, if not
/// done a moment ago. Thread-safe. Throws: Error(invalid_argument) if no shared_ptr has the module.
template <class State>
void attach(torch::nn::Module& module, std::shared_ptr<State> state) {
  detail::attach(module, typeid(State), std::move(state));
}

/// Records that an API (such as `fully_shard`) was applied to a module. Throws as `attach`.
void note_applied(torch::nn::Module& module, std::string api, dist::Mesh mesh);
/// Returns the name of the API that was applied to this module itself; std::nullopt if none was.
/// Thread-safe. Source: github.com/pytorch/pytorch, change 113654.
std::optional<std::string> applied_api(const torch::nn::Module& module);
/// Returns the mesh of the API that was applied to this module itself; std::nullopt if none was.
/// Thread-safe.
std::optional<dist::Mesh> applied_mesh(const torch::nn::Module& module);

/// Whether a backward averages gradients over the ranks.
enum class GradientSync { on, off };  // off: gradients accumulate on each rank

/// State that an API, such as fully_shard, stores for a module. Tessera calls its functions in each
/// pass (forward and backward) whose root is this module or a module above it.
class PassMember : public ModuleState {
 public:
  /// Called when a forward over the root begins.
  virtual void begin_forward() = 0;
  /// Called when the outermost backward over the root begins. On some ranks this backward may not
  /// reach this module.
  virtual void begin_backward() = 0;
  /// Switches the averaging of gradients, from the next backward on. Calls nest: averaging is on
  /// again when each `off` has been followed by an `on`.
  virtual void set_gradient_sync(GradientSync sync) = 0;
};

/// Returns the number of modules with a ModuleState. Frees the states of modules that were
/// destroyed.
std::size_t num_modules();

}  // namespace tessera::registry
