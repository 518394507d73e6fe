#include "reshard/destination_units.h"

#include <algorithm>
#include <utility>

#include "formats/per_rank_rules.h"

namespace tessera::reshard {
namespace {

using formats::Alias;
using formats::CheckpointContents;
using formats::TensorEntry;

/// Returns the tensor with this name, or the tensor whose alias has this name; nullptr if there is
/// neither.
const TensorEntry* find_under_any_name(const CheckpointContents& source, const std::string& name) {
  if (const TensorEntry* tensor = source.find_tensor(name)) return tensor;
  for (const Alias& alias : source.aliases) {
    if (alias.fqn == name) return source.find_tensor(alias.target);
  }
  return nullptr;
}

/// Returns whether a unit's parameters fit the source; if not, reports why.
bool fits_source(const FlatUnit& unit, const CheckpointContents& source, const PlanOptions& options,
                 PlanReport& report) {
  bool fits = true;
  for (const FlatUnitParameter& parameter : unit.parameters) {
    const TensorEntry* tensor = find_under_any_name(source, parameter.fqn);
    if (tensor == nullptr) {
      report.relaxable(options.missing, "units", parameter.fqn, "a tensor of that name", "none");
      fits = false;
    } else if (tensor->meta.shape != parameter.shape) {
      report.problem("units", parameter.fqn, "shape " + shape_to_string(tensor->meta.shape),
                     shape_to_string(parameter.shape) + " in the units");
      fits = false;
    } else if (!options.units.empty() && tensor->meta.dtype != unit.dtype) {
      report.problem("units", parameter.fqn, "dtype " + std::string(dtype_name(tensor->meta.dtype)),
                     std::string(dtype_name(unit.dtype)) + " in the units");
      fits = false;
    }
  }
  return fits;
}

/// Says whether all parameters of a unit are at the destination.
bool is_complete(const FlatUnit& unit, const CheckpointContents& destination) {
  return std::ranges::all_of(unit.parameters, [&](const FlatUnitParameter& parameter) {
    return destination.find_tensor(parameter.fqn) != nullptr ||
           std::ranges::find(destination.aliases, parameter.fqn, &Alias::fqn) !=
               destination.aliases.end();
  });
}

}  // namespace

std::vector<FlatUnit> choose_units(const CheckpointContents& source, const PlanOptions& options,
                                   const std::optional<Strategy>& strategy, PlanReport& report) {
  std::vector<FlatUnit> units = options.units.empty() ? source.units : options.units;
  const bool is_flat = strategy && strategy->sharding == Strategy::Sharding::flat;
  if (is_flat && units.empty()) {
    refuse_options("strategy " + strategy_to_string(*strategy), "flat units",
                   "a source that records none", {Remedy::Action::give_units});
  }
  std::erase_if(units,
                [&](const FlatUnit& unit) { return !fits_source(unit, source, options, report); });
  return units;
}

std::vector<FlatUnit> units_at_destination(std::span<const FlatUnit> units,
                                           const PlanOptions& options,
                                           const MovedSelection& selection) {
  std::vector<FlatUnit> result;
  for (FlatUnit unit : units) {
    bool are_all_selected = true;
    for (FlatUnitParameter& parameter : unit.parameters) {
      are_all_selected = are_all_selected && selection.contains(parameter.fqn);
      parameter.fqn = formats::name_after_renames(parameter.fqn, options.renames);
    }
    if (options.cast && is_floating_point(unit.dtype)) unit.dtype = *options.cast;
    if (are_all_selected) result.push_back(std::move(unit));
  }
  return result;
}

void remove_incomplete_units(CheckpointContents& destination) {
  std::erase_if(destination.units,
                [&](const FlatUnit& unit) { return !is_complete(unit, destination); });
}

}  // namespace tessera::reshard
