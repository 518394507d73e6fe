#include "reshard/tensor_planner.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/cast.h"
#include "base/size_text.h"
#include "formats/name_pattern.h"
#include "formats/per_rank_rules.h"
#include "reshard/cast_rule.h"
#include "reshard/piece_index.h"
#include "reshard/quantized_cast.h"
#include "reshard/source_check.h"
#include "reshard/source_gaps.h"
#include "tessera/formats/format_driver.h"

namespace tessera::reshard {

namespace {

constexpr std::string_view kModelBegin = "model.";

}  // namespace

using formats::CheckpointContents;
using formats::FormatTraits;
using formats::Piece;
using formats::StateKind;
using formats::TensorEntry;

TensorPlanner::TensorPlanner(const CheckpointContents& source, const PlanOptions& options,
                             const SourceGaps& gaps, const DestinationLayout& layout,
                             std::span<const StateRole> roles, std::span<const MovedTensor> moved,
                             Plan& plan, PlanReport& report)
    : source_(source),
      options_(options),
      gaps_(gaps),
      layout_(layout),
      plan_(plan),
      report_(report),
      roles_(roles),
      layout_check_(source, options, report),
      merge_planner_(source, options, layout, report),
      holds_replicas_(formats::traits_of(options.format).holds_replicas),
      balance_(plan.destination.world_size) {
  if (options.cast) {
    quantized_.emplace(source, options.quantization_method);
    unknown_codes_ = quantized_->unknown_codes_in_words();
    cast_rule_.emplace(source, roles_);
  }
  if (source.aliases.empty()) return;
  std::vector<bool> have_own_name(source.tensors.size());
  for (const MovedTensor& each : moved) {  // aliases come last
    const std::size_t tensor = each.source_tensor;
    if (*each.source_name == source.tensors[tensor].meta.fqn) have_own_name[tensor] = true;
    if (!have_own_name[tensor]) names_of_aliases_.emplace(tensor, each.name);
  }
}

void TensorPlanner::plan_tensor(const MovedTensor& moved) {
  if (!can_be_moved(moved)) return;
  const std::optional<PresentPieces> present = find_present_pieces(
      source_, moved.source_tensor, *moved.source_name, gaps_, options_.missing, report_);
  if (present && !present->are_enough) return;

  const StateRole& role = roles_[moved.source_tensor];
  if (role.is_misnamed) note_misnamed(moved);
  TensorEntry entry = entry_of(moved);
  TensorCopy copy{moved.source_tensor, {}, {}};
  if (!cast(moved, entry) || !merge_planner_.plan(moved, role, entry, copy)) return;

  place_pieces(moved, copy, entry);
  find_sources(present ? present->tensor : source_.tensors[moved.source_tensor], entry, copy);
  if (present) present->restore_numbers(copy);
  plan_.nbytes_to_write += nbytes_to_write(entry);
  if (entry.meta.fqn.starts_with(kModelBegin)) {
    const auto guess = layout_.guess_of(entry, moved.source_tensor);
    if (guess != DestinationLayout::Guess::none) guesses_[guess].push_back(entry.meta.fqn);
  }
  entry.pieces = pieces_pool_.share(std::move(entry.pieces));
  copy.source_pieces = source_pieces_pool_.share(std::move(copy.source_pieces));
  plan_.destination.tensors.push_back(std::move(entry));
  plan_.copies.push_back(std::move(copy));
}

/// Returns whether a tensor is complete and valid in the source and has a layout; else reports why.
bool TensorPlanner::can_be_moved(const MovedTensor& moved) {
  const TensorEntry& tensor = source_.tensors[moved.source_tensor];
  if (is_bare_flat_vector(tensor.meta.fqn)) {
    report_.problem("flat vector", *moved.source_name, "a layout that names its parameters",
                    "a flat vector of FSDP1 without a layout", {Remedy::Action::give_flat_layout});
    return false;
  }
  return has_sound_pieces(tensor, options_.missing, report_) &&
         has_shape_of_kind(source_, tensor, roles_[moved.source_tensor], report_) &&
         has_layout(moved);
}

/// Returns whether a tensor, or the parameter that it follows, has a layout. If not, reports it.
bool TensorPlanner::has_layout(const MovedTensor& moved) {
  const StateRole& role = roles_[moved.source_tensor];
  const bool is_whole_on_all_ranks = role.kind == StateKind::scalar_parameter ||
                                     role.kind == StateKind::scalar_table ||
                                     role.kind == StateKind::opaque;
  if (is_whole_on_all_ranks) return true;
  return role.parameter_index ? layout_check_.has_layout(*role.parameter_index,
                                                         name_of_parameter(*role.parameter_index))
                              : layout_check_.has_layout(moved.source_tensor, moved.name);
}

void TensorPlanner::note_misnamed(const MovedTensor& moved) {
  const TensorMeta& state = source_.tensors[moved.source_tensor].meta;
  const TensorMeta& parameter = source_.tensors[*roles_[moved.source_tensor].parameter_index].meta;
  const std::string shape = parameter.fqn + ' ' + shape_to_string(parameter.shape);
  std::string expected = "the shape of " + shape + " or of its rows";
  if (state.shape == parameter.shape) {
    expected = "one number for each row of " + shape;
  } else if (!parameter.shape.empty() && state.numel() == parameter.shape[0]) {
    expected = "the shape of " + shape;
  }
  report_.note("kind of state", *moved.source_name, expected + ", as the name suggests",
               shape_to_string(state.shape) + " (it is moved unchanged)");
}

/// Returns the destination's entry of a tensor, with the dtype and shape of the source and without
/// pieces.
TensorEntry TensorPlanner::entry_of(const MovedTensor& moved) const {
  const TensorEntry& tensor = source_.tensors[moved.source_tensor];
  const StateRole& role = roles_[moved.source_tensor];
  TensorEntry entry;
  entry.meta = {moved.name, tensor.meta.dtype, tensor.meta.shape};
  entry.kind = role.kind;
  entry.key_path = moved.key_path;
  entry.dict_order = moved.dict_order;
  if (role.parameter_index) entry.parameter = name_of_parameter(*role.parameter_index);
  return entry;
}

/// Returns the name of a parameter at the destination. If it is tied and only some of its names are
/// moved, this is the first of these.
std::string TensorPlanner::name_of_parameter(std::size_t source_tensor) const {
  const auto alias = names_of_aliases_.find(source_tensor);
  return alias == names_of_aliases_.end()
             ? formats::name_after_renames(source_.tensors[source_tensor].meta.fqn,
                                           options_.renames)
             : alias->second;
}

/// Applies PlanOptions::cast to an entry. Returns false if the cast is not possible; reports why.
bool TensorPlanner::cast(const MovedTensor& moved, TensorEntry& entry) {
  const bool is_cast_kind = entry.kind == StateKind::plain || entry.kind == StateKind::pointwise ||
                            entry.kind == StateKind::row_wise;
  if (options_.cast && is_complex(entry.meta.dtype)) return note_uncast(entry);
  if (!options_.cast || !is_floating_point(entry.meta.dtype)) return true;
  if (entry.meta.dtype == *options_.cast) return true;
  if (!is_cast_kind) return note_uncast(entry);
  const CastVerdict verdict = cast_rule_->verdict_of(moved.source_tensor);
  const bool is_kept = verdict == CastVerdict::keep || verdict == CastVerdict::keep_outside;
  // A scale without dimensions is refused only if it surely belongs to codes: `logit_scale` is
  // kept.
  const bool may_be_quantized = !is_kept || quantized_->find(moved.source_tensor) != nullptr;
  if (may_be_quantized &&
      !is_no_quantized_part(
          *quantized_, moved.source_tensor, *moved.source_name, *options_.cast,
          {Remedy::Action::keep_dtype, formats::pattern_of(source_, *moved.source_name)},
          report_)) {
    return false;
  }
  if (verdict == CastVerdict::keep_outside) kept_outside_.push_back(entry.meta.fqn);
  if (is_kept) return note_uncast(entry);
  if (unknown_codes_) {
    report_.problem("cast", entry.meta.fqn,
                    "numbers to cast to " + std::string(dtype_name(*options_.cast)),
                    *unknown_codes_ + " (move without a cast)");
    unknown_codes_.reset();  // once is enough
    return false;
  }
  if (!can_cast(entry.meta.dtype, *options_.cast)) {
    report_.problem("cast", entry.meta.fqn,
                    "a dtype that casts to " + std::string(dtype_name(*options_.cast)),
                    std::string(dtype_name(entry.meta.dtype)) +
                        " (leave this tensor out, or move without a cast)");
    return false;
  }
  if (verdict == CastVerdict::cast_outside) cast_outside_.push_back(entry.meta.fqn);
  if (verdict == CastVerdict::cast_apart) cast_apart_.push_back(entry.meta.fqn);
  entry.meta.dtype = *options_.cast;
  return true;
}

/// Returns the bytes that a tensor takes on disk: of all its pieces, including stored replicas.
std::uint64_t TensorPlanner::nbytes_to_write(const TensorEntry& entry) const {
  if (!holds_replicas_) return entry.meta.nbytes();
  std::uint64_t nbytes = 0;
  for (const Piece& piece : entry.pieces) nbytes += nbytes_of(piece.region, entry.meta.dtype);
  return nbytes;
}

/// Counts a tensor that the cast leaves as it is. Returns true: it can be moved.
bool TensorPlanner::note_uncast(const TensorEntry& entry) {
  UncastTensors& uncast = plan_.uncast;
  if (uncast.count == 0 || entry.meta.fqn < uncast.first) uncast.first = entry.meta.fqn;
  ++uncast.count;
  return true;
}

/// Adds notes about tensors of the model that may be parameters, although they are not cut, or
/// buffers, although they are.
void TensorPlanner::note_guesses() {
  using Guess = DestinationLayout::Guess;
  constexpr const char* kState =
      "optimizer state for each parameter, which tells parameters from buffers";
  for (const auto& [guess, names] : guesses_) {
    const bool is_one = names.size() == 1;
    const std::string they_are = is_one ? "it is taken for a " : "they are taken for ";
    const auto note = [&](const char* expected, const std::string& found) {
      report_.note("buffers", *std::ranges::min_element(names), expected,
                   counted(names.size(), "tensor") + " " + found);
    };
    if (guess == Guess::buffer) {
      note(kState,
           "without such state that the source does not cut, so " + they_are +
               (is_one ? "buffer" : "buffers") +
               ": an ordinary tensor on each rank, which FSDP2 does not load into a parameter (cut "
               "parameters, such as frozen ones, by the rules of a mesh)");
    } else if (guess == Guess::parameter) {
      note(kState, "without such state; " + they_are + (is_one ? "parameter" : "parameters") +
                       ": a DTensor, which FSDP2 does not load into a buffer (leave buffers whole "
                       "by the rules of a mesh)");
    } else {
      note("more than one rank, whose files show which tensors are whole on each",
           std::string(is_one ? "that is" : "that are") +
               " no DTensor in the source: one rank's file has a DTensor in its place, which FSDP2 "
               "does not load into a buffer");
    }
  }
}

void TensorPlanner::finish() {
  layout_check_.note_unused_rules();
  note_guesses();
  const auto note = [&](std::vector<std::string>& names, const std::string& outcome) {
    if (names.empty()) return;
    std::ranges::sort(names);
    report_.note("cast", names.front(), "only tensors of the model and its optimizer",
                 counted(names.size(), "tensor") + " beside them, such as this (" + outcome + ")");
  };
  note(kept_outside_, "not cast: state of the trainer is not rounded");
  note(cast_outside_, "cast too: copies of the model's tensors, or tensors of other modules");
  note(cast_apart_,
       "cast too, though no weight or bias is in their dict, and no optimizer has them");
}

void TensorPlanner::place_pieces(const MovedTensor& moved, const TensorCopy& copy,
                                 TensorEntry& entry) {
  const bool has_new_form = !copy.merged_widths.empty() || copy.num_repeated_rows != 0;
  if (layout_.keeps_pieces() && !has_new_form) {
    for (Shard& shard : kept_shards(source_.tensors[moved.source_tensor])) {
      entry.pieces.push_back({std::move(shard.region), shard.ranks[0]});
    }
  } else {
    const StateRole& role = roles_[moved.source_tensor];
    for (const Shard& shard : layout_.shards_of_entry(entry, moved.source_tensor, role)) {
      if (holds_replicas_) {
        for (const int rank : shard.ranks) entry.pieces.push_back({shard.region, rank});
        continue;
      }
      const std::uint64_t nbytes = nbytes_of(shard.region, entry.meta.dtype);
      entry.pieces.push_back({shard.region, balance_.choose(shard.ranks, nbytes)});
    }
  }
  const FormatTraits::Pieces pieces = formats::traits_of(options_.format).pieces;
  if (pieces == FormatTraits::Pieces::boxes &&
      !layout_.keeps_flat_ranges(entry, moved.source_tensor)) {
    cut_into_boxes(entry);
  }
  // Writers that sort pieces use this order.
  std::ranges::stable_sort(entry.pieces.edit(), {}, &Piece::region);
}

}  // namespace tessera::reshard
