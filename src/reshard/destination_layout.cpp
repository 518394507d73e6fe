#include "reshard/destination_layout.h"

#include <algorithm>
#include <map>
#include <utility>

#include "formats/numbered_state.h"
#include "formats/per_rank.h"
#include "formats/pointwise_state.h"
#include "reshard/layout_check.h"
#include "reshard/plan_report.h"
#include "reshard/row_wise_shards.h"
#include "reshard/tied_tables.h"
#include "tessera/formats/format_driver.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointContents;
using formats::FormatTraits;
using formats::Piece;
using formats::StateKind;
using formats::TensorEntry;

/// Returns the world size from the options, else from the source; 0 if `hybrid:AxB` contains it.
int wanted_world_size(const CheckpointContents& source, const PlanOptions& options) {
  int wanted = options.world_size;
  if (options.table_plan) {
    const int planned = options.table_plan->world_size;
    if (wanted == 0) wanted = planned;
    if (wanted != planned) {
      refuse_options("world size", std::to_string(planned) + ", as in the table plan",
                     std::to_string(wanted));
    }
  }
  if (options.mesh) {
    const int of_mesh = options.mesh->world_size();
    if (wanted == 0) wanted = of_mesh;
    if (wanted != of_mesh) {
      refuse_options("world size", std::to_string(of_mesh) + ", as in the mesh",
                     std::to_string(wanted));
    }
  }
  const bool is_hybrid = options.strategy.starts_with("hybrid");  // `hybrid:AxB` has the world size
  if (wanted == 0 && !is_hybrid) wanted = std::max(1, source.world_size);
  return wanted;
}

/// Throws if two options contradict each other, such as a mesh and a strategy.
void check_options_agree(const PlanOptions& options) {
  const bool has_strategy = !options.strategy.empty();
  if (options.mesh && has_strategy) {
    refuse_options("layout", "either a mesh or a strategy", "both");
  }
  if (options.like &&
      (options.world_size != 0 || has_strategy || options.table_plan || options.mesh)) {
    refuse_options(
        "layout",
        "either another checkpoint's layout, or a world size, strategy, mesh or table plan",
        "both");
  }
}

bool is_whole(const TensorEntry& tensor, const Piece& piece) {
  return numel_of(piece.region) == tensor.meta.numel();
}

/// Returns whether a tensor is a vector of numbered state, as the parts of flat parameters (FSDP1)
/// are. No reader takes quantized state for such a part.
bool is_numbered_vector(const TensorEntry& tensor) {
  return tensor.meta.shape.size() == 1 && formats::is_numbered_state(tensor.key_path) &&
         !formats::is_quantized_state(tensor.meta.fqn, tensor.meta.dtype);
}

/// Returns whether a tensor has dimensions, and each of its pieces is the whole tensor.
bool is_stored_whole(const TensorEntry& tensor) {
  return !tensor.meta.shape.empty() && std::ranges::all_of(tensor.pieces, [&](const Piece& piece) {
    return is_whole(tensor, piece);
  });
}

/// Returns whether the source has a tensor that is cut into several pieces.
bool has_cut_tensor(const CheckpointContents& source) {
  return std::ranges::any_of(source.tensors, [](const TensorEntry& tensor) {
    return std::ranges::any_of(tensor.pieces,
                               [&](const Piece& piece) { return !is_whole(tensor, piece); });
  });
}

}  // namespace

LayoutRule choose_layout_rule(const CheckpointContents& source, const PlanOptions& options) {
  check_options_agree(options);
  const bool has_rule = options.world_size != 0 || !options.strategy.empty() ||
                        options.table_plan || options.mesh || options.like;
  if (formats::traits_of(options.format).pieces == FormatTraits::Pieces::whole_tensors) {
    if (has_rule) {
      refuse_options(
          "format " + std::string(options.format.name()),
          "no option that cuts tensors (world size, strategy, mesh, table plan or another "
          "checkpoint's layout), because the format holds whole tensors",
          "at least one");
    }
    return {parse_strategy("replicated", 1), 1};
  }
  if (!has_rule && formats::traits_of(options.format).holds_replicas) {
    const int num_ranks = std::max(1, source.world_size);
    return {parse_strategy("dim0", num_ranks), num_ranks};
  }
  if (!has_rule) return {std::nullopt, std::max(1, source.world_size)};
  if (options.like) {
    const int num_ranks = std::max(1, options.like->world_size);
    return {parse_strategy("replicated", num_ranks), num_ranks};
  }
  const int wanted = wanted_world_size(source, options);
  const std::string fallback = options.table_plan || options.mesh ? "replicated" : "dim0";
  const Strategy strategy =
      parse_strategy(options.strategy.empty() ? fallback : options.strategy, wanted);
  if (strategy.sharding == Strategy::Sharding::flat &&
      formats::traits_of(options.format).holds_replicas) {
    refuse_options(
        "strategy " + options.strategy,
        "a strategy that cuts one dimension, as a DTensor does: dim0, dim1 or hybrid:AxB; "
        "or replicated, because of format " +
            std::string(options.format.name()),
        "parts of flat parameters");
  }
  return {strategy, strategy.world_size()};
}

DestinationLayout::DestinationLayout(const CheckpointContents& source, const PlanOptions& options,
                                     const LayoutRule& rule, std::span<const FlatUnit> units,
                                     std::span<const StateRole> roles)
    : source_(source),
      options_(options),
      rule_(rule),
      unit_index_(units),
      holds_replicas_(formats::traits_of(options.format).holds_replicas),
      keeps_uncut_(holds_replicas_ && has_cut_tensor(source)),
      keeps_cuts_(holds_replicas_ && stores_replicas(source)),
      other_stores_replicas_(holds_replicas_ && options.like && stores_replicas(*options.like)) {
  if (options.table_plan) {
    table_rules_ = rules_by_tensor(table_names(source, options.renames), *options.table_plan);
  }
  if (!holds_replicas_) return;
  if (options.like) other_cuts_ = cut_dimensions(*options.like);
  for (const StateRole& role : roles) {
    if (role.parameter_index) with_state_.insert(*role.parameter_index);
  }
  has_numbered_state_ = std::ranges::any_of(source.tensors, [](const TensorEntry& tensor) {
    return formats::is_numbered_state(tensor.key_path);
  });
  for (const formats::Simplification& simplified : source.simplifications) {
    using Kind = formats::Simplification::Kind;
    const bool is_dtensor =
        simplified.kind == Kind::dtensor || simplified.kind == Kind::dtensor_of_rank;
    if (is_dtensor) dtensors_.insert(simplified.name);
  }
  for (const TensorEntry& tensor : source.tensors) {
    const auto own = formats::parse_per_rank_name(tensor.meta.fqn);
    if (!own || own->rank >= rule.world_size) continue;
    if (cuts_numbered_vectors() && is_numbered_vector(tensor)) continue;
    names_of_ranks_.insert(tensor.meta.fqn);
    names_of_ranks_.insert(own->name);
  }
}

/// Returns whether no vector of numbered state may be whole on each rank: a reader can take such
/// vectors for parts of a flat parameter if other tensors are cut and none has replicas. Always
/// true for a mesh, another checkpoint's layout and a table plan, where this is not known.
bool DestinationLayout::cuts_numbered_vectors() const {
  if (!holds_replicas_) return false;
  if (options_.mesh || options_.like || options_.table_plan) return true;
  return rule_.strategy->sharding != Strategy::Sharding::replicated &&
         rule_.strategy->num_replicas == 1;
}

/// Returns whether a name has the format's prefix of uncut tensors, such as `extra_state.`.
bool DestinationLayout::is_under_uncut_prefix(const std::string& name) const {
  const std::string_view uncut = formats::traits_of(options_.format).uncut_prefix;
  return !uncut.empty() && name.starts_with(uncut);
}

/// Returns whether a tensor stays whole on all ranks: if ranks have different values of it, if its
/// name has the format's prefix of uncut tensors, or if it is taken for a buffer. A tensor with the
/// prefix may be cut only if the source stores replicas and cuts it, so that the cut is a
/// trainer's: moves to formats without replicas cut all tensors.
bool DestinationLayout::stays_uncut(std::size_t source_tensor, const std::string& name) const {
  const TensorEntry& tensor = source_.tensors[source_tensor];
  if (names_of_ranks_.contains(tensor.meta.fqn)) return true;
  const bool is_under_prefix = is_under_uncut_prefix(name);
  if (!is_under_prefix) return is_taken_for_buffer(source_tensor);
  return !keeps_cuts_ || is_stored_whole(tensor);
}

/// Returns whether a tensor is an ordinary one among DTensors, or the source cuts other tensors,
/// but not this one, and nothing shows that it is a parameter to cut: no optimizer has state of it,
/// and it is no range of a flat vector, in which a parameter may be whole on one rank. In files of
/// ranks, state shows nothing: their trainer chose what is whole on every rank. But a vector of
/// numbered state may be cut, and a tensor of one row that only some ranks have.
bool DestinationLayout::is_taken_for_buffer(std::size_t source_tensor) const {
  const TensorEntry& tensor = source_.tensors[source_tensor];
  if (!dtensors_.empty()) return !dtensors_.contains(tensor.meta.fqn);
  if (!keeps_uncut_ || !is_stored_whole(tensor)) return false;
  if (with_state_.contains(source_tensor) && !keeps_cuts_) return false;
  if (is_numbered_vector(tensor) || formats::has_only_flat_ranges(tensor)) return false;
  return tensor.meta.shape[0] > 1 ||
         tensor.pieces.size() == static_cast<std::size_t>(source_.world_size);
}

/// Returns whether the layout of a tensor follows only from what it is taken for, not from a rule
/// that names it.
bool DestinationLayout::is_guessed(const TensorEntry& entry, std::size_t source_tensor) const {
  const bool has_strategy = rule_.strategy && !options_.mesh && !options_.like &&
                            rule_.strategy->sharding != Strategy::Sharding::replicated;
  return has_strategy && entry.kind == StateKind::plain && !table_rules_.contains(source_tensor) &&
         !has_values_of_ranks(source_tensor) && !is_under_uncut_prefix(entry.meta.fqn);
}

DestinationLayout::Guess DestinationLayout::guess_of(const TensorEntry& entry,
                                                     std::size_t source_tensor) const {
  if (!holds_replicas_ || !is_guessed(entry, source_tensor)) return Guess::none;
  if (entry.meta.shape.empty() || entry.meta.numel() == 0) return Guess::none;
  const bool shows_buffers = keeps_cuts_ || !dtensors_.empty();
  if (shows_buffers || keeps_uncut_) {
    if (!is_taken_for_buffer(source_tensor)) return Guess::none;
    if (rule_.world_size == 1) return shows_buffers ? Guess::lost : Guess::none;
    return shows_buffers ? Guess::none : Guess::buffer;
  }
  // Modules have parameters of these names. Tied and frozen ones have no state of their own.
  const std::string& name = entry.meta.fqn;
  if (name.ends_with(".weight") || name.ends_with(".bias")) return Guess::none;
  const bool has_optimizer = has_numbered_state_ || !with_state_.empty();
  return has_optimizer && !with_state_.contains(source_tensor) ? Guess::parameter : Guess::none;
}

/// Returns the shards of a tensor in PlanOptions::like. If the other checkpoint does not cut a
/// tensor, and the destination stores replicas, all ranks get the tensor: the other checkpoint may
/// have it on one rank only because its format has no replicas.
std::vector<Shard> DestinationLayout::shards_of_other(const TensorEntry& tensor,
                                                      const std::string& name) const {
  std::vector<Shard> shards = shards_like(options_, name);
  if (!holds_replicas_) return shards;
  if (names_of_ranks_.contains(tensor.meta.fqn) ||
      (is_under_uncut_prefix(name) && !other_stores_replicas_) ||
      is_uncut_in_other(tensor.meta.shape, shards)) {
    return shards_of({Strategy::Sharding::replicated, rule_.strategy->world_size(), 1},
                     tensor.meta.shape);
  }
  return shards;
}

/// Returns whether these shards of PlanOptions::like are copies of a tensor that is not cut. A
/// dimension of size 1 may be cut: its first part is whole, the others have no elements. Dimension
/// 0 counts as cut if any dimension is cut, because a vector has only this one.
bool DestinationLayout::is_uncut_in_other(const Shape& shape,
                                          const std::vector<Shard>& shards) const {
  if (shards.size() != 1 || numel_of(shards[0].region) != numel_of(shape)) return false;
  const std::vector<int>& ranks = shards[0].ranks;
  const int stride = rule_.strategy->world_size() / static_cast<int>(ranks.size());
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] != static_cast<int>(i) * stride) return true;  // not the first rank of a replica
  }
  for (std::size_t dim = 0; dim < shape.size(); ++dim) {
    const bool is_cut =
        other_stores_replicas_ || other_cuts_.contains(dim) || (dim == 0 && !other_cuts_.empty());
    if (shape[dim] == 1 && is_cut) return false;
  }
  return true;
}

std::vector<Shard> DestinationLayout::shards_of_parameter(std::size_t source_tensor,
                                                          const std::string& name) const {
  const TensorEntry& parameter = source_.tensors[source_tensor];
  if (!rule_.strategy) return kept_shards(parameter);
  const auto rule = table_rules_.find(source_tensor);
  if (rule != table_rules_.end() && parameter.meta.shape.size() == 2) {
    return table_shards(rule->second, parameter.meta.shape, rule_.strategy->world_size());
  }
  if (options_.like) return shards_of_other(parameter, name);
  if (options_.mesh) {
    return options_.mesh->shards_of(name_for_mesh(*options_.mesh, name, parameter.meta.shape),
                                    parameter.meta.shape);
  }
  if (stays_uncut(source_tensor, name)) {
    return shards_of({Strategy::Sharding::replicated, rule_.strategy->world_size(), 1},
                     parameter.meta.shape);
  }
  return shards_of(*rule_.strategy, parameter.meta.shape, unit_index_.find(parameter.meta.fqn));
}

bool DestinationLayout::keeps_flat_ranges(const TensorEntry& entry,
                                          std::size_t source_tensor) const {
  if (!holds_replicas_ || options_.mesh || options_.like || options_.table_plan) return false;
  const Strategy& strategy = *rule_.strategy;
  return strategy.sharding == Strategy::Sharding::dim0 && strategy.num_replicas == 1 &&
         rule_.world_size == source_.world_size &&
         is_flat_state(entry, source_.tensors[source_tensor]);
}

std::vector<Shard> DestinationLayout::shards_of_entry(const TensorEntry& entry,
                                                      std::size_t source_tensor,
                                                      const StateRole& role) const {
  const auto whole = [&] {
    return shards_of({Strategy::Sharding::replicated, rule_.strategy->world_size(), 1},
                     entry.meta.shape);
  };
  if (keeps_flat_ranges(entry, source_tensor)) {
    return kept_shards(source_.tensors[source_tensor]);
  }
  if (has_values_of_ranks(source_tensor)) return whole();
  const auto like_parameter = [&] {
    return role.parameter_index ? shards_of_parameter(*role.parameter_index, entry.parameter)
                                : shards_of_parameter(source_tensor, entry.meta.fqn);
  };
  switch (entry.kind) {
    case StateKind::plain:
      return shards_of_parameter(source_tensor, entry.meta.fqn);
    case StateKind::pointwise:
      return like_parameter();
    case StateKind::row_wise:
      if (!role.parameter_index) return like_parameter();
      return row_wise_shards(like_parameter(), source_.tensors[*role.parameter_index].meta.shape,
                             entry.meta.shape);
    case StateKind::row_wise_per_shard:
      if (!role.parameter_index) break;
      return shards_of_row_blocks(like_parameter(),
                                  source_.tensors[*role.parameter_index].meta.shape);
    case StateKind::opaque:
      if (!cuts_numbered_vectors() || !is_numbered_vector(entry)) break;
      return shards_of({Strategy::Sharding::dim0, 1, rule_.strategy->world_size()},
                       entry.meta.shape);
    case StateKind::scalar_parameter:
    case StateKind::scalar_table:
      break;
  }
  return whole();
}

bool is_flat_state(const TensorEntry& entry, const TensorEntry& source_tensor) {
  return is_numbered_vector(entry) && entry.parameter.empty() &&
         entry.meta.shape == source_tensor.meta.shape &&
         formats::has_only_flat_ranges(source_tensor);
}

std::vector<Shard> kept_shards(const TensorEntry& tensor) {
  std::map<Region, int> rank_of;
  for (const Piece& piece : tensor.pieces) {
    const auto [it, is_new] = rank_of.emplace(piece.region, piece.rank);
    if (!is_new) it->second = std::min(it->second, piece.rank);
  }
  std::vector<Shard> shards;
  for (const auto& [region, rank] : rank_of) {
    if (numel_of(region) != 0) shards.push_back({region, {rank}});
  }
  if (shards.empty()) shards.push_back({whole_box(tensor.meta.shape), {0}});
  return shards;
}

void cut_into_boxes(TensorEntry& entry) {
  std::vector<Piece> pieces;
  for (Piece& piece : entry.pieces.edit()) {
    if (std::holds_alternative<Box>(piece.region)) {
      pieces.push_back(std::move(piece));
      continue;
    }
    for (Box& box : boxes_of(piece.region, entry.meta.shape)) {
      pieces.push_back({std::move(box), piece.rank});
    }
  }
  entry.pieces = std::move(pieces);
}

}  // namespace tessera::reshard
