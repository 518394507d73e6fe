#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/layout/table_plan.h"

// The state of optimizers that are fused into an embedding table's backward, under Tessera's names
// and under torchrec's. In both, `<fqn>` is the parameter's name within the model:
//
//   optimizer          canonical `state.<fqn>.`             torchrec `state.<fqn>.<table>.`
//   SGD                -                                    -
//   Adagrad            sum (pointwise)                      momentum1, like the table
//   row-wise Adagrad   row_sum (row-wise)                   momentum1, by row
//   Adam, LAMB         exp_avg, exp_avg_sq (pointwise)      momentum1, exp_avg_sq
//   the same by row    exp_avg, row_exp_avg_sq (row-wise)   momentum1, exp_avg_sq by row
//
// Under torchrec's names row-wise state has one block of rows for each column shard of the table,
// in order of column; under canonical ones it has one element per row.
// Source: torchrec's EmbeddingFusedOptimizer and FBGEMM's `get_optimizer_state`, read in 1.6.
namespace tessera::reshard {

/// Another name for a tensor of some contents.
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
/// Left out, so that they stay as they are: tables with other state beside those above
/// (`prev_iter`, `row_counter`, `iter`, `sparse_ema`), as `momentum1` then may be something else
/// than a sum. `momentum2`, which torchrec wrote before 0.5, is `exp_avg_sq`. The `param_groups` of
/// both name parameters and not state, so they stay too.
std::vector<StateName> canonical_names(const formats::CheckpointContents& contents);

/// Returns the name that torchrec's fused optimizers have for every tensor with a canonical name,
/// in order of tensor.
///
/// Left out are tables that torchrec trains with an optimizer of torch.optim, whose names are
/// canonical already: those that `plan` makes data_parallel; where it says nothing of a table, or
/// there is no plan (nullptr), those with a `step` beside their `sum`. A fused Adam's `step` has no
/// place in torchrec's state and stays as it is, which torchrec's loader passes over.
std::vector<StateName> torchrec_names(const formats::CheckpointContents& contents,
                                      const TablePlan* plan);

}  // namespace tessera::reshard
