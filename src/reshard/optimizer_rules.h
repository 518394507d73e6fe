#pragma once

#include <cstddef>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/layout/strategy.h"

namespace tessera::reshard {

/// What a tensor is to a parameter, which decides how it follows that parameter's layout.
struct StateRole {
  formats::StateKind kind = formats::StateKind::plain;
  /// The parameter among the same contents; nothing where it is not there (optimizer state keyed by
  /// numbers), and then the tensor is laid out by its own shape.
  std::optional<std::size_t> parameter_index;
  /// Its name is that of pointwise or row-wise state, and its shape is neither of the parameter nor
  /// of its rows. The kind is then opaque.
  bool is_misnamed = false;
};

/// Returns the role of every tensor, parallel to `contents.tensors`.
///
/// A kind that the checkpoint records is taken as it is. Formats of others record none; there the
/// kind follows from the name under `<prefix>state.<parameter>.<name>`, never from a shape:
///
/// - pointwise: exp_avg, exp_avg_sq, max_exp_avg_sq, momentum_buffer, square_avg, grad_avg,
///   acc_delta, sum, exp_inf, prev, step_size, ax;
/// - row-wise: row_sum, row_exp_avg_sq;
/// - scalar of the parameter: step, mu, eta, mu_product;
/// - `<table>.iter`: scalar of the table;
/// - other `<table>.<name>` of torchrec's fused optimizers: pointwise or row-wise, as declared
/// below;
/// - anything else: opaque.
///
/// torchrec gives row-wise and pointwise Adagrad the same name `momentum1`; the number of
/// dimensions says which one it is, and `rows x column shards` elements say that every column shard
/// of the table keeps rows of its own (row_wise_per_shard). Source: torch/optim/*.py and
/// fbgemm_gpu's split embedding optimizers.
std::vector<StateRole> classify_state(const formats::CheckpointContents& contents);

/// Tells which entries of a checkpoint belong to its optimizers: state whose parameter is there or
/// recorded, and all below a `state` that has such a tensor, below a `param_groups`, and below the
/// `state` beside one. Keeps names of `contents`, which must outlive it. Thread-safe.
class OptimizerEntries {
 public:
  explicit OptimizerEntries(const formats::CheckpointContents& contents);
  /// `name` is that of a tensor, a value or an alias.
  bool contain(std::string_view name) const;

 private:
  std::set<std::string_view> roots_;  // what stands before `state` and `param_groups`: `optim.`
  std::set<std::string_view> by_role_;
};

/// Returns who holds what of row-wise state, given who holds what of its parameter: a row lies
/// where the row's first element lies. Shape: `[rows]` or `[rows, 1, …]`. Requires:
/// `parameter_shards` cover the parameter once.
std::vector<Shard> row_wise_shards(std::span<const Shard> parameter_shards,
                                   std::span<const std::int64_t> parameter_shape,
                                   std::span<const std::int64_t> state_shape);

/// Returns who holds what of row_wise_per_shard state: each shard of the table its rows, in the
/// block of its columns. Shape: `[rows * column shards]`. Requires: a 2-d table cut into boxes that
/// cover it once.
std::vector<Shard> shards_of_row_blocks(std::span<const Shard> parameter_shards,
                                        std::span<const std::int64_t> parameter_shape);

/// Returns the widths of the column shards that regions cut a 2-d table into, in order of column;
/// one entry where they do not cut it by column: each shard's columns from top to bottom, side by
/// side. Units: elements.
std::vector<std::int64_t> column_widths(std::span<const Region> regions,
                                        std::span<const std::int64_t> shape);

}  // namespace tessera::reshard
