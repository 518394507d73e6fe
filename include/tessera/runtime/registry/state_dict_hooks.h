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

/// How a state dict shows sharded tensors. Names as in torch.distributed.fsdp.
enum class StateDictType {
  full,     // whole tensors, as the unsharded model has them
  sharded,  // this rank's shards, and which ranks hold the others (StateTensor::layout)
  local,    // only this rank's shards; load them on a rank that holds the same elements or fewer
};
inline constexpr StateDictType FULL = StateDictType::full;
inline constexpr StateDictType SHARDED = StateDictType::sharded;
inline constexpr StateDictType LOCAL = StateDictType::local;

/// How a state dict shows tensors, and which ranks get it.
struct StateDictOptions {
  StateDictType type = StateDictType::full;  // of sharded tensors
  bool offload_to_cpu = false;               // copies tensors on other devices to the CPU
  /// Whether only rank 0 of the mesh gets entries; the other ranks get none. FULL only.
  bool rank0_only = false;
  friend bool operator==(const StateDictOptions&, const StateDictOptions&) = default;
};

/// Which differences loading a state dict accepts; by default none.
struct LoadStateDictOptions {
  bool allow_missing = false;     // entries that the state dict lacks stay unchanged
  bool allow_unexpected = false;  // entries that the module lacks are ignored
  bool allow_cast = false;        // converts between floating dtypes, if no number is too large
  /// Whether only rank 0 of the mesh has entries, with whole tensors. Rank 0 then sends each rank
  /// its shards, tensor by tensor.
  bool rank0_only = false;
};

/// The problems that a load has found in a state dict; the load then throws them as one error.
struct LoadReport {
  const LoadStateDictOptions& options;
  /// Rules: `missing`, `unexpected`, `shape`, `dtype`, `cast` (too large), `shard` (not valid),
  /// `hole` (no shard has some elements), `meta`, `groups` (they differ), `tied tensors`.
  std::vector<formats::Finding> problems{};
  /// Adds a problem. `rule`: see `problems`.
  void add(std::string rule, std::string fqn, std::string expected, std::string found);
};

/// Returns the tensor entry of `fqn`; follows aliases. Returns nullptr, and reports why, if the
/// entry is missing, is not a tensor, or has another shape, a dtype or number that may not be cast,
/// or invalid shards. (If the options allow missing entries, does not report a missing one.)
StateTensor* find_fitting(StateDict& state_dict, const std::string& fqn, DType dtype,
                          std::span<const std::int64_t> shape, LoadReport& report);

namespace registry {

/// A handle that removes a hook. Copies refer to the same hook. May outlive the module.
class HookHandle {
 public:
  HookHandle() = default;
  explicit HookHandle(std::function<void()> remove) : remove_(std::move(remove)) {}
  /// Removes the hook. Does nothing if the hook was removed already or the module is destroyed.
  void remove() {
    if (remove_) remove_();
  }

 private:
  std::function<void()> remove_;
};

/// Runs before the entries of `module` and its children are collected. `prefix`: the module's name
/// in the state dict; empty, or ends with a dot.
using StateDictPreHook = std::function<void(torch::nn::Module& module, const std::string& prefix,
                                            const StateDictOptions& options)>;
/// Runs after the entries of `module` and its children are collected. May change all entries under
/// `prefix`. With `rank0_only`, runs on rank 0 alone if no module has a pre hook (docs/state.md).
using StateDictPostHook =
    std::function<void(torch::nn::Module& module, StateDict& state_dict, const std::string& prefix,
                       const StateDictOptions& options)>;
/// Runs before the entries of `module` are loaded; `load` runs it only for entries that it cannot
/// read in place (docs/state.md). May replace all entries under `prefix`: `state_dict` is a copy.
using LoadPreHook = std::function<void(torch::nn::Module& module, StateDict& state_dict,
                                       const std::string& prefix, LoadReport& report)>;
/// Runs on every rank after `load_state_dict` or `load` has loaded the module and its children.
using LoadPostHook = std::function<void(torch::nn::Module& module)>;

/// Adds a hook to a module. Hooks of one module run in the order they were added. Pre hooks of a
/// module run before those of its children, post hooks after them. Does not change the module. Not
/// collective, but all ranks must add the same hooks. Throws: Error(invalid_argument) if no
/// shared_ptr holds the module. Source: github.com/pytorch/pytorch, changes 90436 and 87900.
HookHandle add_state_dict_pre_hook(torch::nn::Module& module, StateDictPreHook hook);
/// As add_state_dict_pre_hook, but runs after entries are collected.
HookHandle add_state_dict_post_hook(torch::nn::Module& module, StateDictPostHook hook);
/// As add_state_dict_pre_hook, but runs before entries are loaded. Must not write into tensors.
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
