#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/optimizer_rules.h"
#include "reshard/plan_report.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

// What every planner asks of the source, in the same words. A check reports what it finds, and
// says whether the tensor can be used.
namespace tessera::reshard {

inline constexpr const char* kColumnShardRule = "row-wise state per column shard";

/// Says whether a tensor is what FSDP1 writes for a whole unit under LOCAL_STATE_DICT, by the names
/// it gives such vectors (`_flat_param`; `flat_param_0` before torch 1.13). Nothing in the
/// checkpoint says what lies in it.
bool is_bare_flat_vector(std::string_view fqn);

void report_missing_files(const formats::CheckpointContents& source, Relaxation missing,
                          PlanReport& report);

/// Reports what cannot be had as it lies in files that are lost.
void report_missing_data(const std::string& fqn, const std::set<std::string>& files,
                         Relaxation missing, PlanReport& report);
/// Notes that other replicas have what lies in files that are lost.
void note_replaced(const std::string& fqn, const std::set<std::string>& files, PlanReport& report);

/// Checks that the pieces hold every element once. `missing` lets holes pass, overlaps never.
bool has_sound_pieces(const formats::TensorEntry& tensor, Relaxation missing, PlanReport& report);

/// Checks that state has a shape that can follow its parameter: a file may say what it likes.
bool has_shape_of_kind(const formats::CheckpointContents& source,
                       const formats::TensorEntry& tensor, const StateRole& role,
                       PlanReport& report);

/// Checks that row_wise_per_shard state has one block of rows per column shard of its table.
bool has_rows_per_column_shard(const formats::TensorEntry& tensor,
                               const formats::TensorEntry& table,
                               std::span<const std::int64_t> widths, PlanReport& report);

/// Says whether state of `num_shards` column shards may be merged into one, which loses something.
bool may_merge(const std::string& fqn, std::size_t num_shards, Relaxation lossy,
               PlanReport& report);

}  // namespace tessera::reshard
