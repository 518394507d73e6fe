#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <typeindex>
#include <vector>

#include "tessera/runtime/dist/mesh.h"

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

/// Notes that an API (`fully_shard`, `replicate`) has been applied to a module, over a mesh.
void note_applied(torch::nn::Module& module, std::string api, dist::Mesh mesh);
/// Returns the API that has been applied to this very module; nothing where none has. Never changes
/// the module or the registry. Source: github.com/pytorch/pytorch, change 113654.
std::optional<std::string> applied_api(const torch::nn::Module& module);
/// Returns the mesh that it was applied over. Never changes anything either.
std::optional<dist::Mesh> applied_mesh(const torch::nn::Module& module);

/// Whether a backward reduces gradients over the ranks.
enum class GradientSync { on, off };  // off: gradients add up on each rank by themselves

/// What an API keeps at a module to take part in the passes over a root above it, or over itself.
class PassMember : public ModuleState {
 public:
  /// A forward over the root begins.
  virtual void begin_forward() = 0;
  /// A backward over the root begins, the outermost one. Whether it reaches this member may differ
  /// from rank to rank.
  virtual void begin_backward() = 0;
  /// Takes effect with the next backward. `off` nests: each is ended by an `on`.
  virtual void set_gradient_sync(GradientSync sync) = 0;
};

/// Returns how many modules have a state. Lets go of the states of modules that have died.
std::size_t num_modules();

}  // namespace tessera::registry
