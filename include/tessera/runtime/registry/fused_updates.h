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

/// A parameter that its module updates within the backward, with the optimizer state of that.
struct FusedParameter {
  /// A tensor of optimizer state, such as `exp_avg`.
  struct Slot {
    std::string name;
    StateTensor entry;  // parts are the state's own memory
  };
  std::string name;  // within the module
  at::Tensor tensor;
  std::vector<Slot> slots;
  std::int64_t* step = nullptr;  // how many steps were taken; null: they are not counted
};

/// The parameters that a module updates by itself: their optimizer state is saved and loaded with
/// all other, and no optimizer of torch::optim is asked about them.
class FusedUpdates {
 public:
  virtual ~FusedUpdates() = default;
  /// Returns the parameters with the state as it is now, which entries refer to.
  virtual std::vector<FusedParameter> parameters() = 0;
  /// Returns the fields of the parameter group that these parameters make up: `lr`, …
  virtual Value::Dict fields() const = 0;
  /// Takes fields that were saved. Throws: Error(mismatch) naming one that is missing, no number,
  /// or of another optimizer.
  virtual void check_fields(const Value::Dict& fields) const = 0;
  /// Replaces the fields by those that were saved. Requires: check_fields has let them pass.
  virtual void set_fields(const Value::Dict& fields) = 0;
};

/// A base of modules that update parameters.
class UpdatesParameters {
 public:
  virtual ~UpdatesParameters() = default;
  /// Returns nullptr where this one happens to update none.
  virtual std::shared_ptr<FusedUpdates> fused_updates() const = 0;
};

/// Throws Error(unsupported) where a module updates parameters by itself, on this rank alone.
/// `api`: what meets it. For modules without an API of their own (registry::applied_api).
void refuse_own_updates(const torch::nn::Module& module, const std::string& fqn,
                        const std::string& api);

/// A module that updates parameters, and what it is called in the model.
struct FoundFusedUpdates {
  std::string prefix;  // empty, or ends with a dot
  std::shared_ptr<FusedUpdates> updates;
};

/// Returns all such modules at and below `model`, in order of the module tree.
std::vector<FoundFusedUpdates> find_fused_updates(const torch::nn::Module& model);

}  // namespace tessera::registry
