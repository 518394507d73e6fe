#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "reshard/destination_layout.h"
#include "reshard/moved_names.h"
#include "reshard/plan_report.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

// Decides when row-wise state (one number per row) is merged or repeated, because the column shards
// of its table change. The arithmetic is in row_wise_merge.h.
namespace tessera::reshard {

inline constexpr const char* kColumnShardRule = "row-wise state per column shard";

/// Returns whether `tensor`, 1-d state of kind row_wise_per_shard, has the length rows of `table` *
/// number of column shards: one number per row for each column shard. If not, reports a problem.
bool has_rows_per_column_shard(const formats::TensorEntry& tensor,
                               const formats::TensorEntry& table,
                               std::span<const std::int64_t> widths, PlanReport& report);

/// Returns whether the caller allows merging the state of `num_shards` column shards into one,
/// which is lossy. Adds a note if it is allowed; adds a problem and returns false otherwise.
bool may_merge(const std::string& fqn, std::size_t num_shards, Relaxation lossy,
               PlanReport& report);

/// Decides how many times the destination of a move has a table's row-wise state: once for each
/// column shard, or only once. If the columns do not change, the state does not change. Otherwise,
/// if the source has several states, they are merged into one, which is lossy; if the destination
/// has several, each is a copy of that one.
///
/// Keeps views of its arguments, which must outlive it.
class RowWiseMergePlanner {
 public:
  RowWiseMergePlanner(const formats::CheckpointContents& source, const PlanOptions& options,
                      const DestinationLayout& layout, PlanReport& report)
      : source_(source), options_(options), layout_(layout), report_(report) {}

  /// If `moved` is row-wise state of a table whose column shards change, sets the kind and the
  /// shape of `entry`, and in `copy` how rows are merged and repeated. Returns whether the state
  /// can be moved; if not, reports why.
  bool plan(const MovedTensor& moved, const StateRole& role, formats::TensorEntry& entry,
            TensorCopy& copy) const;

 private:
  std::vector<std::int64_t> column_widths_in_source(std::size_t table_index) const;
  std::vector<std::int64_t> column_widths_at_destination(std::size_t table_index,
                                                         const std::string& table_name) const;
  bool is_kept_per_column_shard(const MovedTensor& moved, const StateRole& role) const;

  const formats::CheckpointContents& source_;
  const PlanOptions& options_;
  const DestinationLayout& layout_;
  PlanReport& report_;
};

}  // namespace tessera::reshard
