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

// Hooks that run while a state dict is made or loaded. `fully_shard`, `shard` and users add them;
// `state_dict` itself knows none of these APIs.

namespace tessera {

/// What a state dict holds of sharded tensors. Names as in torch.distributed.fsdp.
enum class StateDictType {
  full,     // whole tensors, as the unsharded model has them
  sharded,  // this rank's shards, and which ranks hold the others
  local,    // only this rank's shards; load them on a rank that holds the same shards or fewer
};
inline constexpr StateDictType FULL = StateDictType::full;
inline constexpr StateDictType SHARDED = StateDictType::sharded;
inline constexpr StateDictType LOCAL = StateDictType::local;

/// What a state dict holds, and on which ranks.
struct StateDictOptions {
  StateDictType type = StateDictType::full;  // of sharded tensors
  bool offload_to_cpu = false;               // copies tensors on other devices to the CPU
  /// Whether only rank 0 of the mesh gets entries. FULL only.
  bool rank0_only = false;
  friend bool operator==(const StateDictOptions&, const StateDictOptions&) = default;
};

/// Which differences loading a state dict accepts; by default none.
struct LoadStateDictOptions {
  bool allow_missing = false;     // entries that the state dict lacks stay unchanged
  bool allow_unexpected = false;  // entries that the module lacks are ignored
  bool allow_cast = false;        // another floating dtype is converted
  /// Whether only rank 0 of the mesh has entries. Rank 0 then sends each rank its shards, tensor by
  /// tensor.
  bool rank0_only = false;
};

/// All problems found in a state dict.
struct LoadReport {
  const LoadStateDictOptions& options;
  /// Rules: `missing`, `unexpected`, `shape`, `dtype`, `shard`, `hole`, `meta`, `groups`,
  /// `tied tensors`.
  std::vector<formats::Finding> problems{};
  /// Adds a problem. `rule`: see `problems`.
  void add(std::string rule, std::string fqn, std::string expected, std::string found);
};

/// Returns the tensor entry of `fqn`; follows aliases. Returns nullptr, and reports why, if the
/// entry is missing (not reported if the options allow missing entries), is not a tensor, or has
/// another shape, a dtype that may not be cast, or shards that do not fit.
StateTensor* find_fitting(StateDict& state_dict, const std::string& fqn, DType dtype,
                          std::span<const std::int64_t> shape, LoadReport& report);

namespace registry {

/// A handle that removes a hook. Copies refer to the same hook. May outlive the module.
class HookHandle {
 public:
  HookHandle() = default;
  explicit HookHandle(std::function<void()> remove) : remove_(std::move(remove)) {}
  /// Removes the hook. Does nothing if it was removed already or the module is dead.
  void remove() {
    if (remove_) remove_();
  }

 private:
  std::function<void()> remove_;
};

/// Runs before entries of `module` and its children are collected. `prefix` is empty or ends with a
/// dot.
using StateDictPreHook = std::function<void(torch::nn::Module& module, const std::string& prefix,
                                            const StateDictOptions& options)>;
/// Runs after the entries of `module` and its children are collected. May change all entries under
/// `prefix`.
using StateDictPostHook =
    std::function<void(torch::nn::Module& module, StateDict& state_dict, const std::string& prefix,
                       const StateDictOptions& options)>;
/// Runs before the entries of `module` are loaded. May replace all entries under `prefix`, because
/// `state_dict` is a copy. Must not write into their tensors, which may be the caller's.
using LoadPreHook = std::function<void(torch::nn::Module& module, StateDict& state_dict,
                                       const std::string& prefix, LoadReport& report)>;
/// Runs after the module and its children have been loaded.
using LoadPostHook = std::function<void(torch::nn::Module& module)>;

/// Adds a hook to a module. Hooks of one module run in the order they were added. Pre hooks of a
/// root run before those of its leaves, post hooks after them. Does not change the module. Not
/// collective, but all ranks must add the same hooks. Throws: Error(invalid_argument) if no
/// shared_ptr holds the module. Source: github.com/pytorch/pytorch, changes 90436 and 87900.
HookHandle add_state_dict_pre_hook(torch::nn::Module& module, StateDictPreHook hook);
/// As add_state_dict_pre_hook, but runs after entries are collected.
HookHandle add_state_dict_post_hook(torch::nn::Module& module, StateDictPostHook hook);
/// As add_state_dict_pre_hook, but runs before entries are loaded.
HookHandle add_load_state_dict_pre_hook(torch::nn::Module& module, LoadPreHook hook);
/// As add_state_dict_pre_hook, but runs after entries are loaded.
HookHandle add_load_state_dict_post_hook(torch::nn::Module& module, LoadPostHook hook);

/// The hooks of one module, in the order they were added.
struct StateDictHooks final : ModuleState {
  std::map<std::uint64_t, StateDictPreHook> pre;
  std::map<std::uint64_t, StateDictPostHook> post;
  std::map<std::uint64_t, LoadPreHook> load_pre;
  std::map<std::uint64_t, LoadPostHook> load_post;
  std::uint64_t next_number = 0;
};

}  // namespace registry
}  // namespace tessera
