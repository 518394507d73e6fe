#pragma once

#include <cstddef>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

#include "formats/pointwise_state.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::reshard {

/// How a tensor relates to a parameter. This decides how the tensor follows the parameter's layout.
struct StateRole {
  formats::StateKind kind = formats::StateKind::plain;
  /// The index of the parameter in the same contents. Empty if the tensor is no state, or if its
  /// parameter is missing (state under numbers); the tensor is then laid out by its own shape.
  std::optional<std::uint32_t> parameter_index;
  /// Whether the name says pointwise or row-wise state, but the shape is not that of such state:
  /// `exp_avg` with one number per row. The kind is then opaque.
  bool is_misnamed = false;
};

/// The places in a checkpoint's names where the `state` of an optimizer is. A module, a table or a
/// dict may be called `state` too (`enc.state.weight`), so the name alone does not tell. A `state`
/// is an optimizer's if it is in a dict `optim` or `optimizer`, if `param_groups` is beside it, or
/// if a name in it is that of state:
///
/// - `<parameter>.<name>` or `<name>.<parameter>` with a parameter of the checkpoint, and a name
///   that classify_state knows; any name after the parameter's full name;
/// - `<number>.<name>` with a name that classify_state knows;
/// - anything that begins or ends with a name of state that no module has, such as `exp_avg` (the
///   end: only for the innermost `state` of the name);
/// - a name for which the checkpoint records the parameter.
///
/// Names of values count like those of tensors (`opt.state.0.step`). Everything else in this
/// `state` is optimizer state then too. Only the eight outermost components `state` of a name are
/// tried. Keeps views of the names in `contents`, which must outlive it. Thread-safe.
class StateRoots {
 public:
  explicit StateRoots(const formats::CheckpointContents& contents);
  /// Returns the part of the name of optimizer state after the optimizer's `state`: `w.exp_avg` for
  /// `optim.state.w.exp_avg`. Returns nothing for every other name.
  std::optional<std::string_view> behind_state(std::string_view fqn) const;
  /// Returns the part of the same name before `state`, with the last dot: `optim.`
  std::optional<std::string_view> root_of(std::string_view fqn) const;

 private:
  std::unordered_set<std::string_view> roots_;
};

/// Returns the role of every tensor, parallel to `contents.tensors`.
///
/// If the checkpoint records a kind, that kind is used. Other projects' formats record none; for
/// them the kind follows from the name `<prefix>state.<parameter>.<name>`, if this is the `state`
/// of an optimizer (StateRoots) and the shape fits the name:
///
/// - pointwise: exp_avg, exp_avg_sq, max_exp_avg_sq, momentum_buffer, square_avg, grad_avg,
///   acc_delta, sum, exp_inf, prev, step_size, ax, fp32_param, master_param, param;
/// - row-wise: row_sum, row_exp_avg_sq;
/// - one number for the parameter: step, mu, eta, mu_product;
/// - one number for the table: `<table>.iter`;
/// - other `<table>.<name>` of torchrec's fused optimizers: pointwise or row-wise, as described
///   below;
/// - anything else: opaque.
///
/// Megatron's torch_dist has the name first: `<prefix>state.<name>.<parameter>`. This form is used
/// if the parameter is in the checkpoint.
///
/// torchrec gives row-wise and pointwise Adagrad the same name `momentum1`. The number of
/// dimensions tells them apart. `rows x column shards` elements mean that every column shard of the
/// table has its own rows (row_wise_per_shard). Source: torch/optim/*.py and fbgemm_gpu's split
/// embedding optimizers.
std::vector<StateRole> classify_state(const formats::CheckpointContents& contents);
/// Does the same with the StateRoots of `contents`, if the caller has them.
std::vector<StateRole> classify_state(const formats::CheckpointContents& contents,
                                      const StateRoots& states);

using formats::is_pointwise_name;

/// State whose key comes before its parameter, as Megatron's torch_dist names it:
/// `optimizer.state.exp_avg.decoder.final_layernorm.weight`. Views of the key.
struct LeadingStateKey {
  std::string_view name;       // `exp_avg`
  std::string_view parameter;  // everything after the name
};
/// Splits a text that StateRoots::behind_state has returned. Returns nothing if it does not begin
/// with a known name of state, such as `exp_avg`.
std::optional<LeadingStateKey> parse_leading_state_key(std::string_view rest);

/// Returns whether state of this name is a copy of its parameter in float32.
bool is_copy_of_parameter(std::string_view name);

/// Returns whether the name is of the form of Megatron's distributed optimizer in which no
/// parameter's name is: `optimizer.distributed.dp_group_idx_0.gbuf_idx_0.….exp_avg`, a flat buffer,
/// or an object beside it.
bool is_in_flat_buffers(std::string_view name);

/// The entries of a checkpoint that belong to its optimizers: Megatron's flat buffers; state whose
/// parameter the checkpoint has or records, and all else below the same `state`; all below a
/// `param_groups`, and below a `state` beside it; all below a `grad_scaler` that is in `optim` or
/// `optimizer` (a dict, or a list of dicts), or that is beside one of these `state` or
/// `param_groups`, except at the top level. Keeps views of the names in `contents`, which must
/// outlive it. Thread-safe.
class OptimizerEntries {
 public:
  explicit OptimizerEntries(const formats::CheckpointContents& contents);
  /// Returns whether a tensor, a value or an alias of this name belongs to an optimizer.
  bool contain(std::string_view name) const;
  /// Returns whether an entry may belong to an optimizer, although nothing proves it: it is in an
  /// `optim` or `optimizer`, or in Lightning's `optimizer_states`, that has the `param_groups` or
  /// the state of an optimizer at any depth, as the copies of parameters in float32 are that mixed
  /// precision keeps (`optimizer.fp32_groups`).
  bool may_contain(std::string_view name) const;
  const StateRoots& states() const { return states_; }

 private:
  StateRoots states_;
  std::set<std::string_view> roots_;  // parts of names before `state` and `param_groups`: `optim.`
  std::set<std::string_view> dicts_;  // `optim.` or `optimizer.` that has such a root
  std::set<std::string_view> by_role_;
};

}  // namespace tessera::reshard
