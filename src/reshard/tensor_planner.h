#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/list_pool.h"
#include "formats/piece_pool.h"
#include "formats/quantized_tensors.h"
#include "reshard/cast_rule.h"
#include "reshard/destination_layout.h"
#include "reshard/layout_check.h"
#include "reshard/moved_names.h"
#include "reshard/optimizer_rules.h"
#include "reshard/plan_report.h"
#include "reshard/row_wise_merge_plan.h"
#include "reshard/writer_balance.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Returns a hash of a list of numbers.
struct NumbersHash {
  std::uint64_t operator()(const std::vector<std::uint32_t>& numbers) const {
    std::uint64_t hash = numbers.size();
    for (const std::uint32_t number : numbers) hash = tessera::detail::mix_hash(hash, number);
    return hash;
  }
};

/// Plans the tensors of a move, one by one: checks a tensor in the source, sets its dtype, shape
/// and pieces at the destination, and finds the source pieces of each piece. Adds the tensor to the
/// plan, or reports why it cannot be moved.
///
/// Keeps views of the constructor's arguments, which must outlive it. Life cycle: `plan_tensor` for
/// each moved tensor, always in the same order, because ranks take turns as writers of replicas;
/// then `finish`.
class TensorPlanner {
 public:
  /// `roles`: the result of classify_state for the source. `moved`: all moved tensors; only the
  /// constructor reads this list. Requires: `plan.destination.world_size` is set.
  TensorPlanner(const formats::CheckpointContents& source, const PlanOptions& options,
                const SourceGaps& gaps, const DestinationLayout& layout,
                std::span<const StateRole> roles, std::span<const MovedTensor> moved, Plan& plan,
                PlanReport& report);

  void plan_tensor(const MovedTensor& moved);

  /// Adds notes that need all tensors: about the layout and the cast. Call it last.
  void finish();

 private:
  bool can_be_moved(const MovedTensor& moved);
  bool has_layout(const MovedTensor& moved);
  void note_misnamed(const MovedTensor& moved);
  formats::TensorEntry entry_of(const MovedTensor& moved) const;
  std::string name_of_parameter(std::size_t source_tensor) const;
  bool cast(const MovedTensor& moved, formats::TensorEntry& entry);
  std::uint64_t nbytes_to_write(const formats::TensorEntry& entry) const;
  bool note_uncast(const formats::TensorEntry& entry);
  void note_guesses();
  void place_pieces(const MovedTensor& moved, const TensorCopy& copy, formats::TensorEntry& entry);

  const formats::CheckpointContents& source_;
  const PlanOptions& options_;
  const SourceGaps& gaps_;
  const DestinationLayout& layout_;
  Plan& plan_;
  PlanReport& report_;
  const std::span<const StateRole> roles_;              // one per tensor of the source
  std::optional<formats::QuantizedTensors> quantized_;  // the source's; only for a cast
  std::optional<std::string> unknown_codes_;  // why nothing may be cast, until it was reported
  std::optional<CastRule> cast_rule_;         // only for a cast
  std::vector<std::string> kept_outside_;     // tensors outside the model that a cast leaves alone
  std::vector<std::string> cast_outside_;     // tensors outside the model that are cast
  std::vector<std::string> cast_apart_;       // tensors in dicts that look like no model's
  std::map<DestinationLayout::Guess, std::vector<std::string>> guesses_;  // names of tensors
  // The new names of tensors that are moved under the name of an alias only, by index.
  std::map<std::size_t, std::string> names_of_aliases_;
  LayoutCheck layout_check_;
  const RowWiseMergePlanner merge_planner_;
  const bool holds_replicas_;  // the destination's format stores replicas
  WriterBalance balance_;
  formats::PiecePool pieces_pool_;
  tessera::detail::ListPool<std::vector<std::uint32_t>, NumbersHash> source_pieces_pool_;
};

}  // namespace tessera::reshard
