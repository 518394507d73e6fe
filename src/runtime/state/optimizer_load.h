#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "runtime/state/optimizer_adapters.h"
#include "runtime/state/optimizer_parameters.h"
#include "tessera/base/glob.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/runtime/registry/state_dict.h"

namespace tessera::state {

/// Loads a checkpoint into an optimizer in steps: what is wanted of it, into new memory; what its
/// groups are to be; and, when all has been read, the exchange. Keys begin with `optim.`.
class OptimizerLoad {
 public:
  OptimizerLoad(torch::nn::Module& model, torch::optim::Optimizer& optimizer);

  /// Adds what the checkpoint has of each parameter's state to `wanted`. `saved`: the names and
  /// dtypes of its tensors.
  void want(const std::map<std::string, DType>& saved, StateDict& wanted);

  /// Takes the fields of the checkpoint's groups. Reports parameters without a group, and groups
  /// that do not fit. Throws: Error(unsupported), Error(mismatch) for fields that cannot be taken.
  void take_groups(const std::vector<Value::Dict>& saved, const NameSelection& only,
                   bool allow_missing, std::vector<formats::Finding>& problems);

  /// Replaces the optimizer's state and fields. A parameter of which not all that was wanted has
  /// been filled keeps its state; one that the checkpoint has without state loses it.
  void replace(const std::set<std::string>& filled);

 private:
  struct Step {
    std::int64_t* to;
    at::Tensor from;
  };
  /// What becomes of a parameter.
  struct Loaded {
    std::unique_ptr<torch::optim::OptimizerParamState> state;
    std::vector<std::string> wanted;  // keys
    std::vector<Step> steps;          // one, or none
  };

  Loaded want_of(const OptimizerParameter& parameter, const std::map<std::string, DType>& saved,
                 StateDict& wanted) const;

  torch::optim::Optimizer& optimizer_;
  const OptimizerAdapter& adapter_;
  std::vector<OptimizerParameter> parameters_;
  std::vector<Loaded> loaded_;             // parallel to parameters_
  std::unordered_set<std::string> known_;  // parameters that a group of the checkpoint has
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>>
      options_;  // by group; null: as it is
};

}  // namespace tessera::state
