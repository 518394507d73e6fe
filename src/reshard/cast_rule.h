#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "reshard/optimizer_rules.h"
#include "tessera/base/tensor_meta.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::reshard {

/// What a cast does with a tensor.
enum class CastVerdict {
  cast,          // a tensor of the model, or state of the optimizer
  cast_outside,  // a tensor outside the model's dict: of a copy, or of another module
  cast_apart,    // cast too, but in a dict that does not look like a model's
  keep,          // rounding would damage the number and would save no memory
  keep_outside,  // state of the trainer, such as a learning rate schedule or a normalizer
};

/// Tells the tensors of a model from the state that a trainer keeps beside it. The first rule that
/// fits a tensor counts:
///
/// 1. Tensors without dimensions (a step, a scale) and entries of `param_groups`: keep.
/// 2. State of an optimizer: cast.
/// 3. In `_extra_state`, `grad_scaler`, `lr_scheduler` or the like, at any depth: keep_outside.
/// 4. In the dict of a model, or a parameter of an optimizer: cast. A dict `model`, `module`,
///    `state_dict`, `model_state_dict` or `net` is a model's if an optimizer is beside it, or if it
///    is a dict at the top level of the checkpoint, and no mere beginning of names.
/// 5. Beside the dict of a model: cast_outside, if it is a copy of one of the model's tensors
///    (`ema.w` with the shape of `model.w`), or in a module, which is a dict with a `weight` or
///    `bias`; otherwise keep_outside.
/// 6. In a dict with the name of a trainer's (`scheduler`, `sampler`) at the top level or beside an
///    optimizer or a dict called as a model's, and not in a module: keep_outside.
/// 7. In a dict that has no `weight`, `bias` or parameter of an optimizer at any depth, although
///    other dicts have some: cast_apart.
/// 8. The rest: cast.
///
/// Depends only on names, key paths and shapes, so a change of dtypes does not change verdicts.
/// Keeps views of `contents` and `roles`, which must outlive it. Thread-safe.
class CastRule {
 public:
  /// `roles`: what classify_state returns for `contents`.
  CastRule(const formats::CheckpointContents& contents, std::span<const StateRole> roles);

  CastVerdict verdict_of(std::size_t tensor_index) const;
  /// Returns whether a tensor is state of the trainer: whether rules 2 to 8 say keep_outside.
  bool is_of_trainer(std::size_t tensor_index) const;

 private:
  void find_models();
  void index_outside();
  /// Returns the name of a tensor in the model, without the model's dict; empty if it is outside.
  std::string_view name_in_model(std::string_view fqn) const;
  bool is_beside_model(std::string_view fqn) const;
  bool is_in_module(std::string_view fqn) const;
  bool is_copy_or_module(std::string_view fqn, const Shape& shape) const;
  bool is_in_dict_of_trainer(std::string_view fqn) const;
  /// Applies the rules from the second on.
  CastVerdict verdict_by_place(std::size_t tensor_index) const;

  const formats::CheckpointContents& contents_;
  std::span<const StateRole> roles_;
  std::unordered_set<std::size_t> of_model_;      // parameters of optimizers, and tied tensors
  std::unordered_set<std::string_view> models_;   // `app.model.`
  std::unordered_set<std::string_view> places_;   // dicts of models and optimizers: `app.optim.`
  std::unordered_set<std::string_view> besides_;  // the part before a model's key: `app.`, or ``
  std::unordered_multimap<std::string_view, std::size_t> in_model_;  // by the name in the model
  std::unordered_set<std::string_view> modules_;  // dicts with `weight` or `bias`: `ema.layer`
  std::unordered_set<std::string_view> dicts_with_weights_;  // by key paths, and those around them
};

}  // namespace tessera::reshard
