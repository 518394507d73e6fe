#include "reshard/row_wise_merge_plan.h"

#include "reshard/piece_index.h"
#include "reshard/row_wise_shards.h"

namespace tessera::reshard {

using formats::StateKind;
using formats::TensorEntry;

bool has_rows_per_column_shard(const TensorEntry& tensor, const TensorEntry& table,
                               std::span<const std::int64_t> widths, PlanReport& report) {
  const Shape blocks = {table.meta.shape[0] * static_cast<std::int64_t>(widths.size())};
  if (tensor.meta.shape == blocks) return true;
  report.problem(kColumnShardRule, tensor.meta.fqn,
                 "shape " + shape_to_string(blocks) + ", the rows of " + table.meta.fqn +
                     " once for each of its column shards",
                 shape_to_string(tensor.meta.shape));
  return false;
}

bool may_merge(const std::string& fqn, std::size_t num_shards, Relaxation lossy,
               PlanReport& report) {
  if (lossy == Relaxation::allow) {
    report.note(
        "merged", fqn, "one number per row",
        std::to_string(num_shards) + ", one for each column shard (their weighted mean is taken)");
    return true;
  }
  report.problem(kColumnShardRule, fqn, "the same column shards at the destination",
                 "other column shards", {Remedy::Action::allow_lossy});
  return false;
}

bool RowWiseMergePlanner::plan(const MovedTensor& moved, const StateRole& role, TensorEntry& entry,
                               TensorCopy& copy) const {
  const bool is_per_shard = role.kind == StateKind::row_wise_per_shard;
  if ((!is_per_shard && role.kind != StateKind::row_wise) || !role.parameter_index) return true;
  const TensorEntry& tensor = source_.tensors[moved.source_tensor];
  const TensorEntry& table = source_.tensors[*role.parameter_index];
  const std::vector<std::int64_t> whole = column_widths({}, table.meta.shape);
  const auto from = is_per_shard ? column_widths_in_source(*role.parameter_index) : whole;
  if (is_per_shard && !has_rows_per_column_shard(tensor, table, from, report_)) return false;
  auto to = is_kept_per_column_shard(moved, role)
                ? column_widths_at_destination(*role.parameter_index, entry.parameter)
                : whole;
  // State that ranks have their own values of is whole on all ranks, not cut as the table is.
  if (from != to && layout_.has_values_of_ranks(moved.source_tensor)) to = whole;
  // Both lists of widths go from left to right, so equal widths mean equal column shards.
  if (from == to) return true;
  if (from.size() > 1) {
    if (!may_merge(tensor.meta.fqn, from.size(), options_.lossy, report_)) return false;
    copy.merged_widths = from;
  }
  const std::int64_t num_rows = table.meta.shape[0];
  const auto num_blocks = static_cast<std::int64_t>(to.size());
  entry.kind = num_blocks > 1 ? StateKind::row_wise_per_shard : StateKind::row_wise;
  entry.meta.shape = {num_rows * num_blocks};
  if (num_blocks > 1) copy.num_repeated_rows = num_rows;
  return true;
}

std::vector<std::int64_t> RowWiseMergePlanner::column_widths_in_source(
    std::size_t table_index) const {
  const TensorEntry& table = source_.tensors[table_index];
  return column_widths(regions_of(table), table.meta.shape);
}

std::vector<std::int64_t> RowWiseMergePlanner::column_widths_at_destination(
    std::size_t table_index, const std::string& table_name) const {
  std::vector<Region> regions;
  for (const Shard& shard : layout_.shards_of_parameter(table_index, table_name)) {
    regions.push_back(shard.region);
  }
  return column_widths(regions, source_.tensors[table_index].meta.shape);
}

/// Returns whether the destination has this row-wise state once for each column shard of its table,
/// not once for the whole table.
bool RowWiseMergePlanner::is_kept_per_column_shard(const MovedTensor& moved,
                                                   const StateRole& role) const {
  return moved.has_torchrec_name || (role.kind == StateKind::row_wise_per_shard &&
                                     options_.optimizer_names == OptimizerNames::as_stored);
}

}  // namespace tessera::reshard
