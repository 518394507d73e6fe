#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "reshard/optimizer_rules.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/layout/strategy.h"
#include "tessera/reshard/planner.h"

// Decides which ranks of the destination hold which regions of each tensor.
namespace tessera::reshard {

/// The rule that lays out the destination.
struct LayoutRule {
  std::optional<Strategy> strategy;  // none: tensors keep the source's pieces
  int world_size = 1;
};

/// Returns the rule that the options ask for; plan_reshard (planner.h) documents the defaults.
/// Throws: Error(invalid_argument) if the options contradict each other or the format.
LayoutRule choose_layout_rule(const formats::CheckpointContents& source,
                              const PlanOptions& options);

/// The layout rule and the table plan, applied to tensors of the source. Keeps views of source,
/// options and units, which must outlive it and not move. Immutable; thread-safe.
class DestinationLayout {
 public:
  /// `units` is the result of choose_units, `roles` that of classify_state for the source.
  DestinationLayout(const formats::CheckpointContents& source, const PlanOptions& options,
                    const LayoutRule& rule, std::span<const FlatUnit> units,
                    std::span<const StateRole> roles);

  /// Says whether all tensors keep their pieces, except row-wise state that is merged or repeated.
  bool keeps_pieces() const { return !rule_.strategy; }

  /// Returns the shards of a parameter, or of any tensor that is cut by its own shape. `name`: of
  /// this tensor at the destination; a tied tensor has several names.
  std::vector<Shard> shards_of_parameter(std::size_t source_tensor, const std::string& name) const;
  /// Returns whether the tensor is whole on all ranks because ranks have their own values of it.
  bool has_values_of_ranks(std::size_t source_tensor) const {
    return names_of_ranks_.contains(source_.tensors[source_tensor].meta.fqn);
  }

  /// What a tensor is taken for in a format in which parameters are cut and buffers are not.
  enum class Guess {
    none,       // it is known which it is, or does not matter
    buffer,     // nothing shows that it is a parameter: the source cuts others, but not this one
    parameter,  // the source cuts nothing, its optimizer has no state of this tensor, and the name
                // is neither `weight` nor `bias`
    lost,       // a buffer, but one rank's files cannot show it
  };
  Guess guess_of(const formats::TensorEntry& entry, std::size_t source_tensor) const;

  /// Returns whether a destination tensor keeps the flat ranges of its source tensor. This is so
  /// for a vector of numbered state if the destination has a file for each rank and as many ranks
  /// as the source: only FSDP1 has such vectors, and it loads each rank's own range.
  bool keeps_flat_ranges(const formats::TensorEntry& entry, std::size_t source_tensor) const;

  /// Returns the shards of a destination tensor. Its `kind` says how it is cut: by its own shape,
  /// like its parameter (in `role`), or not at all (a copy for each rank). Requires: `entry` is
  /// row-wise state, or `keeps_pieces()` is false (copies need a number of ranks).
  std::vector<Shard> shards_of_entry(const formats::TensorEntry& entry, std::size_t source_tensor,
                                     const StateRole& role) const;

 private:
  bool cuts_numbered_vectors() const;
  bool stays_uncut(std::size_t source_tensor, const std::string& name) const;
  bool is_taken_for_buffer(std::size_t source_tensor) const;
  bool is_guessed(const formats::TensorEntry& entry, std::size_t source_tensor) const;
  bool is_under_uncut_prefix(const std::string& name) const;
  std::vector<Shard> shards_of_other(const formats::TensorEntry& tensor,
                                     const std::string& name) const;
  bool is_uncut_in_other(const Shape& shape, const std::vector<Shard>& shards) const;

  const formats::CheckpointContents& source_;
  const PlanOptions& options_;
  const LayoutRule rule_;
  const FlatUnitIndex unit_index_;
  const bool holds_replicas_;  // the destination's format stores replicas
  const bool keeps_uncut_;     // buffers stay whole on all ranks (is_taken_for_buffer)
  const bool keeps_cuts_;      // tensors under the format's uncut prefix keep the source's cuts
  const bool other_stores_replicas_;
  std::map<std::size_t, TableRule> table_rules_;  // by index of the source tensor
  std::set<std::size_t> other_cuts_;              // the dimensions that PlanOptions::like cuts
  std::set<std::size_t> with_state_;              // source tensors of which an optimizer has state
  bool has_numbered_state_ = false;               // an optimizer has state under numbers
  std::set<std::string, std::less<>> dtensors_;   // of the source; empty: it does not show them
  /// Tensors of which ranks have their own values: stays_uncut and shards_of_other keep them whole.
  std::set<std::string, std::less<>> names_of_ranks_;
};

/// Returns whether an entry is state of a flat parameter (FSDP1) at source and destination: a
/// vector of numbered state that consists of flat ranges. State of a parameter that is known is
/// none: FSDP1 keeps its flat state under numbers alone.
bool is_flat_state(const formats::TensorEntry& entry, const formats::TensorEntry& source_tensor);

/// Returns the pieces of a source tensor as shards, without empty ones. Of several replicas,
/// returns the one on the lowest rank. A tensor without elements gets one shard, on rank 0.
std::vector<Shard> kept_shards(const formats::TensorEntry& tensor);

/// Replaces each flat range among the pieces by boxes, for formats that store only boxes.
void cut_into_boxes(formats::TensorEntry& entry);

}  // namespace tessera::reshard
