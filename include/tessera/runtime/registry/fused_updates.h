#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/value.h"
#include "tessera/runtime/registry/state_dict.h"

namespace tessera::registry {

/// A parameter that its module updates during the backward, with its optimizer state on this rank.
struct FusedParameter {
  /// A tensor of optimizer state, such as `exp_avg`.
  struct Slot {
    std::string name;
    StateTensor entry;  // its local shards share memory with the state
  };
  std::string name;  // within the module
  at::Tensor tensor;
  std::vector<Slot> slots;
  std::int64_t* step = nullptr;  // in the module: number of steps taken; null: not counted
};

/// The parameters that a module updates by itself during the backward. The trainer's optimizer does
/// not update them, but their optimizer state is saved and loaded together with its state.
class FusedUpdates {
 public:
  virtual ~FusedUpdates() = default;
  /// Returns the parameters and their current state. The entries share memory with the state.
  virtual std::vector<FusedParameter> parameters() = 0;
  /// Returns the fields (settings) of the parameter group that these parameters form: `lr`, …
  virtual Value::Dict fields() const = 0;
  /// Checks saved fields. Throws: Error(mismatch) naming a field that is missing, not a number, or
  /// from another optimizer; Error(invalid_argument) naming a number that is out of range.
  virtual void check_fields(const Value::Dict& fields) const = 0;
  /// Replaces the fields by saved ones. Requires: check_fields did not throw for these.
  virtual void set_fields(const Value::Dict& fields) = 0;
};

/// A base class of modules that update their own parameters.
class UpdatesParameters {
 public:
  virtual ~UpdatesParameters() = default;
  /// Returns access to the parameters that this module updates; nullptr if there are none.
  virtual std::shared_ptr<FusedUpdates> fused_updates() const = 0;
};

/// Throws Error(unsupported) if `module` itself updates its parameters. Call it for modules to
/// which no API was applied (registry::applied_api), because each rank would update such a module
/// separately. `fqn`: the module's name; `api`: the caller's. Both are for the message.
void refuse_own_updates(const torch::nn::Module& module, const std::string& fqn,
                        const std::string& api);

/// A module that updates its own parameters, and its name in the model.
struct FoundFusedUpdates {
  std::string prefix;  // empty, or ends with a dot
  std::shared_ptr<FusedUpdates> updates;
};

/// Returns all modules at and below `model` that update their own parameters, in the order of the
/// module tree.
std::vector<FoundFusedUpdates> find_fused_updates(const torch::nn::Module& model);

}  // namespace tessera::registry
