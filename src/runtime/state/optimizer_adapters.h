#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/value.h"

namespace tessera::state {

/// What Tessera knows of one of libtorch's optimizers: the names that torch.optim has in Python for
/// its state and for the fields of its parameter groups.
class OptimizerAdapter {
 public:
  virtual ~OptimizerAdapter() = default;

  /// Returns the adapter of an optimizer. Throws: Error(unsupported) naming what it is, where it is
  /// none of libtorch's or one (LBFGS) whose state belongs to no single parameter.
  static const OptimizerAdapter& of(const torch::optim::Optimizer& optimizer);

  const std::string& name() const { return name_; }

  /// A tensor of a parameter's state, element by element like the parameter.
  struct Slot {
    std::string name;
    at::Tensor* tensor;  // undefined: none yet
    bool is_required;    // by the optimizer's next step, under the options at hand
  };
  virtual std::vector<Slot> slots(torch::optim::OptimizerParamState& state,
                                  const torch::optim::OptimizerOptions& options) const = 0;
  /// Returns the number of steps taken; nullptr where the optimizer counts none.
  virtual std::int64_t* step(torch::optim::OptimizerParamState& state) const = 0;
  virtual std::unique_ptr<torch::optim::OptimizerParamState> make_state() const = 0;
  /// Whether a step wants state to be there already.
  virtual bool makes_state_at_once() const = 0;

  /// Returns all fields that Python has for such a group, but `params`, and those that
  /// `with_fields` was given and nobody knows.
  virtual Value::Dict fields(const torch::optim::OptimizerOptions& options) const = 0;
  /// Returns options with these fields. Unknown ones are kept within, to be saved again. Throws:
  /// Error(unsupported) naming a field whose value libtorch cannot follow (`maximize`);
  /// Error(mismatch) naming one that is missing or no number.
  virtual std::unique_ptr<torch::optim::OptimizerOptions> with_fields(
      const Value::Dict& fields) const = 0;

 protected:
  explicit OptimizerAdapter(std::string name) : name_(std::move(name)) {}

 private:
  std::string name_;
};

}  // namespace tessera::state
