#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/value.h"

namespace tessera::state {

/// Describes one of libtorch's optimizers: the names that Python's torch.optim uses for its state
/// and the fields of its groups.
class OptimizerAdapter {
 public:
  virtual ~OptimizerAdapter() = default;

  /// Returns the adapter of an optimizer. Throws: Error(unsupported) for an optimizer that is
  /// not libtorch's, or whose state does not belong to single parameters (LBFGS).
  static const OptimizerAdapter& of(const torch::optim::Optimizer& optimizer);

  const std::string& name() const { return name_; }

  /// A tensor of a parameter's state that has the parameter's shape, such as `exp_avg`.
  struct Slot {
    std::string name;
    at::Tensor* tensor;  // points to an undefined tensor if the state does not exist yet
    bool is_required;    // the optimizer's next step needs it, given its options
    /// Whether zeros can stand for it if the parameter's other state is there, as in the first
    /// step.
    bool may_begin_at_zero = false;
  };
  virtual std::vector<Slot> slots(torch::optim::OptimizerParamState& state,
                                  const torch::optim::OptimizerOptions& options) const = 0;
  /// Returns where the number of steps is stored; nullptr if the optimizer does not count steps.
  virtual std::int64_t* step(torch::optim::OptimizerParamState& state) const = 0;
  virtual std::unique_ptr<torch::optim::OptimizerParamState> make_state() const = 0;
  /// Returns whether the optimizer's constructor creates the state and `step` relies on it, as
  /// Adagrad's does.
  virtual bool makes_state_at_once() const = 0;

  /// Returns the fields that Python's optimizer saves for a group with these options, except
  /// `params`, plus the fields that libtorch lacks and `with_fields` got.
  virtual Value::Dict fields(const torch::optim::OptimizerOptions& options) const = 0;
  /// Returns options with these fields. Keeps fields that libtorch lacks, to save them again.
  /// Throws: Error(unsupported) naming a field whose value libtorch does not support (`maximize`);
  /// Error(mismatch) naming a field that is missing or of another type.
  virtual std::unique_ptr<torch::optim::OptimizerOptions> with_fields(
      const Value::Dict& fields) const = 0;

 protected:
  explicit OptimizerAdapter(std::string name) : name_(std::move(name)) {}

 private:
  std::string name_;
};

}  // namespace tessera::state
