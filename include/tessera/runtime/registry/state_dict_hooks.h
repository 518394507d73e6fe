#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/runtime/registry/registry.h"
#include "tessera/runtime/registry/state_dict.h"

// What runs around the walks that make and load state dicts. APIs (fully_shard, …) and users attach
// by these hooks alone; the walk itself knows none of them.

namespace tessera {

/// What a state dict holds of tensors that are sharded. Names as in torch.distributed.fsdp.
enum class StateDictType {
  full,     // whole tensors, as the unsharded model has them
  sharded,  // this rank's parts, and who holds the others
  local,    // this rank's parts alone, to be loaded by a rank that holds no more
};
inline constexpr StateDictType FULL = StateDictType::full;
inline constexpr StateDictType SHARDED = StateDictType::sharded;
inline constexpr StateDictType LOCAL = StateDictType::local;

/// What a state dict holds, and on which ranks.
struct StateDictOptions {
  StateDictType type = StateDictType::full;  // of sharded tensors
  bool offload_to_cpu = false;               // copies what lies on another device
  /// Whether rank 0 of the mesh alone gets entries. FULL only.
  bool rank0_only = false;
  friend bool operator==(const StateDictOptions&, const StateDictOptions&) = default;
};

/// What loading a state dict lets pass; by default nothing.
struct LoadStateDictOptions {
  bool allow_missing = false;     // what the state dict lacks stays as it is
  bool allow_unexpected = false;  // what the module lacks is left out
  bool allow_cast = false;        // another floating dtype is converted
  /// Whether rank 0 of the mesh alone has entries, which it sends, tensor by tensor, each rank its
  /// part.
  bool rank0_only = false;
};

/// What has been found wrong with a state dict, all of it.
struct LoadReport {
  const LoadStateDictOptions& options;
  /// Rules: `missing`, `unexpected`, `shape`, `dtype`, `hole`.
  std::vector<formats::Finding> problems{};
  /// Notes a problem. `rule`: see `problems`.
  void add(std::string rule, std::string fqn, std::string expected, std::string found);
};

/// Returns the entry under a key, or of the tensor that it is another name of. Nothing is there: it
/// is reported, unless that is allowed, and nullptr returned; likewise where it is no tensor, has
/// another shape, or a dtype that is not allowed.
StateTensor* find_fitting(StateDict& state_dict, const std::string& fqn, DType dtype,
                          std::span<const std::int64_t> shape, LoadReport& report);

namespace registry {

/// Removes a hook. Copies refer to the same one. Outlives the module without harm.
class HookHandle {
 public:
  HookHandle() = default;
  explicit HookHandle(std::function<void()> remove) : remove_(std::move(remove)) {}
  /// Takes the hook away; nothing where that is done, or the module is gone.
  void remove() {
    if (remove_) remove_();
  }

 private:
  std::function<void()> remove_;
};

/// Runs before the entries of `module` and of what is below it are taken. `prefix` is empty or ends
/// with a dot.
using StateDictPreHook = std::function<void(torch::nn::Module& module, const std::string& prefix,
                                            const StateDictOptions& options)>;
/// Runs when they have been; may change all that stands under `prefix`.
using StateDictPostHook =
    std::function<void(torch::nn::Module& module, StateDict& state_dict, const std::string& prefix,
                       const StateDictOptions& options)>;
/// Runs before the module takes its entries; may change all that stands under `prefix`, in a copy
/// that this load works on.
using LoadPreHook = std::function<void(torch::nn::Module& module, StateDict& state_dict,
                                       const std::string& prefix, LoadReport& report)>;
/// Runs when the module and all below it have been loaded.
using LoadPostHook = std::function<void(torch::nn::Module& module)>;

/// Hooks of one module, in the order in which they were added: pre hooks run from the root to the
/// leaves, post hooks from the leaves to the root. Adding changes nothing about the module itself.
/// Not collective, but to be the same on all ranks. Throws: Error(invalid_argument) where the
/// module is not held by a shared_ptr. Source: github.com/pytorch/pytorch, changes 90436 and 87900.
HookHandle add_state_dict_pre_hook(torch::nn::Module& module, StateDictPreHook hook);
/// As add_state_dict_pre_hook, for when entries have been taken.
HookHandle add_state_dict_post_hook(torch::nn::Module& module, StateDictPostHook hook);
/// As add_state_dict_pre_hook, for before entries are loaded.
HookHandle add_load_state_dict_pre_hook(torch::nn::Module& module, LoadPreHook hook);
/// As add_state_dict_pre_hook, for when entries have been loaded.
HookHandle add_load_state_dict_post_hook(torch::nn::Module& module, LoadPostHook hook);

/// The hooks of one module, by the order in which they were added.
struct StateDictHooks final : ModuleState {
  std::map<std::uint64_t, StateDictPreHook> pre;
  std::map<std::uint64_t, StateDictPostHook> post;
  std::map<std::uint64_t, LoadPreHook> load_pre;
  std::map<std::uint64_t, LoadPostHook> load_post;
  std::uint64_t next_number = 0;
};

}  // namespace registry
}  // namespace tessera
