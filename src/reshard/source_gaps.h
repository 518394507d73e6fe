#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "reshard/plan_report.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

// What a move does if the source cannot deliver what its contents list: files are missing, or a
// value is of a kind that is never read. find_gaps (planner.h) finds the gaps.
namespace tessera::reshard {

/// What is left of a tensor if some of its pieces are missing.
struct PresentPieces {
  formats::TensorEntry tensor;         // without the missing pieces
  std::vector<std::uint32_t> numbers;  // of its pieces in the source
  bool are_enough;                     // whether they hold every element

  /// Converts numbers of these pieces to numbers of the source's pieces.
  void restore_numbers(TensorCopy& copy) const;
};

/// Returns the pieces of a tensor whose files exist. Returns nothing if no piece is missing. If
/// replicas hold everything that is missing, adds a note; otherwise reports the missing files.
/// `name` is the tensor's name in the report.
std::optional<PresentPieces> find_present_pieces(const formats::CheckpointContents& source,
                                                 std::size_t tensor_index, const std::string& name,
                                                 const SourceGaps& gaps, Relaxation missing,
                                                 PlanReport& report);

/// Returns whether the source can deliver a value; if not, reports why.
bool can_give_value(const formats::CheckpointContents& source, std::size_t value_index,
                    const SourceGaps& gaps, Relaxation missing, PlanReport& report);

}  // namespace tessera::reshard
