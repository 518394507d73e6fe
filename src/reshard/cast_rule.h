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

/// Tells the tensors of a model from the state that a trainer keeps beside it.
///
/// Always kept are tensors without dimensions (a step, a scale), entries of `param_groups`, and
/// what is in `_extra_state`, `grad_scaler`, `lr_scheduler` and the like at any depth. A dict
/// `model`, `module`, `state_dict`, `model_state_dict` or `net` is the model's if an optimizer is
/// beside it, or if it is a dict at the top level of the checkpoint, and no mere beginning of
/// names. What is beside such a dict is kept, except for parameters of the optimizer, copies of the
/// model's tensors (`ema.w` with the shape of `model.w`), and tensors in a dict with a `weight` or
/// `bias`, which is a module's. Elsewhere, dicts with the names of trainers (`scheduler`,
/// `sampler`) are kept at the top level and beside a model or an optimizer, and the rest is cast.
/// Of the rest, what is in a dict that has no `weight`, `bias` or parameter of an optimizer gets
/// the verdict `cast_apart`, if other dicts have some.
///
/// Depends only on names, key paths and shapes, so a change of dtypes does not change verdicts.
/// Keeps views of `contents` and `roles`, which must outlive it. Thread-safe.
class CastRule {
 public:
  /// `roles`: what classify_state returns for `contents`.
  CastRule(const formats::CheckpointContents& contents, std::span<const StateRole> roles);

  CastVerdict verdict_of(std::size_t tensor_index) const;
  /// Returns whether a tensor is state of the trainer. Tensors without dimensions may be, too.
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
  /// Returns whether a tensor outside the recognised models may be one of a model's.
  bool looks_like_model(std::size_t tensor_index) const;

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
