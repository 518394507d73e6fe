#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "reshard/plan_report.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

// Handles gaps of the source (data whose files are missing, and values of a kind that is never
// read): leaves them out or reports them. find_gaps (planner.h) finds the gaps.
namespace tessera::reshard {

/// A tensor of the source without its missing pieces.
struct PresentPieces {
  formats::TensorEntry tensor;         // without the missing pieces
  std::vector<std::uint32_t> numbers;  // the pieces' numbers in the source
  bool are_enough;                     // whether they hold every element

  /// Replaces the piece numbers in `copy`, which count only the present pieces, by numbers that
  /// count all pieces of the source.
  void restore_numbers(TensorCopy& copy) const;
};

/// Returns the pieces of a tensor whose files exist; nothing if no piece is missing. If replicas
/// hold all missing data, adds a note; otherwise reports the missing files. `name` is the tensor's
/// name in the report.
std::optional<PresentPieces> find_present_pieces(const formats::CheckpointContents& source,
                                                 std::size_t tensor_index, const std::string& name,
                                                 const SourceGaps& gaps, Relaxation missing,
                                                 PlanReport& report);

/// Returns whether the source can deliver a value; if not, reports why.
bool can_give_value(const formats::CheckpointContents& source, std::size_t value_index,
                    const SourceGaps& gaps, Relaxation missing, PlanReport& report);

}  // namespace tessera::reshard
