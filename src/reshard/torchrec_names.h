#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/layout/table_plan.h"

// The state of optimizers that are fused into an embedding table's backward, under Tessera's
// (canonical) names and torchrec's. In both, `<fqn>` is the parameter's name within the model:
//
//   optimizer          canonical `state.<fqn>.`             torchrec `state.<fqn>.<table>.`
//   SGD                -                                    -
//   Adagrad            sum (pointwise)                      momentum1, like the table
//   row-wise Adagrad   row_sum (row-wise)                   momentum1, by row
//   Adam, LAMB         exp_avg, exp_avg_sq (pointwise)      momentum1, exp_avg_sq
//   the same by row    exp_avg, row_exp_avg_sq (row-wise)   momentum1, exp_avg_sq by row
//
// Under torchrec's names row-wise state has one block of rows for each column shard of the table,
// in order of column; under canonical names it has one element per row. Source: torchrec's
// EmbeddingFusedOptimizer and FBGEMM's `get_optimizer_state`, read in 1.6.
namespace tessera::reshard {

/// A new name for a tensor.
struct StateName {
  std::size_t tensor_index = 0;
  std::string fqn;
  formats::KeyPath key_path{};  // empty: a top-level key
};

/// Says whether a tensor has a name that torchrec's fused optimizers give: `….state.<fqn>.<table>.
/// <name>`, where `<fqn>` is the weight of that table.
bool has_torchrec_name(std::string_view fqn);

/// Returns the canonical name of every tensor that has one of torchrec's names, in order of tensor.
///
/// Leaves out tables that have other state too (`prev_iter`, `row_counter`, `iter`, `sparse_ema`),
/// because their `momentum1` may not be a sum; their names stay as they are. `momentum2`, which
/// torchrec wrote before 0.5, is `exp_avg_sq`. `param_groups` name parameters, not state, so they
/// do not change either.
std::vector<StateName> canonical_names(const formats::CheckpointContents& contents);

/// The result of torchrec_names.
struct TorchrecNames {
  std::vector<StateName> names;
  /// Tensors that keep their names only because the plan does not name their table.
  std::vector<std::size_t> without_rule;
};

/// Returns the name that torchrec's fused optimizers have for every tensor with a canonical name,
/// in order of tensor.
///
/// Leaves out tables that torchrec trains with an optimizer of torch.optim, because their names are
/// canonical already. These are the tables that `plan` makes data_parallel or does not name. If
/// `plan` is nullptr, they are the tables with a `step` beside their `sum`. Leaves out weights that
/// only have a table's name, such as the one-dimensional `bert.embeddings.LayerNorm.weight`.
/// torchrec's state of a fused Adam has no `step`. So a `step` keeps its name, and torchrec's
/// loader ignores it.
TorchrecNames torchrec_names(const formats::CheckpointContents& contents, const TablePlan* plan);

}  // namespace tessera::reshard
