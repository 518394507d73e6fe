#include "tessera/reshard/planner.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>

#include "base/cast.h"
#include "base/digest.h"
#include "reshard/optimizer_rules.h"
#include "reshard/piece_index.h"
#include "reshard/source_check.h"
#include "reshard/torchrec_names.h"
#include "reshard/writer_balance.h"
#include "tessera/formats/format_driver.h"

namespace tessera::reshard {
namespace {

using formats::Alias;
using formats::CheckpointContents;
using formats::FormatTraits;
using formats::KeyPath;
using formats::Piece;
using formats::StateKind;
using formats::TensorEntry;

/// If `from` and `to` both begin with `step`, removes it from both. Returns whether they do.
bool take_common_step(const std::string& step, std::string_view& from, std::string_view& to) {
  const std::string front = step + ".";
  if (!from.starts_with(front) || !to.starts_with(front)) return false;
  from.remove_prefix(front.size());
  to.remove_prefix(front.size());
  return true;
}

/// Returns the key path of a renamed key. Steps that both prefixes share and steps after the prefix
/// stay as they are. What lies between becomes one step, together with the rest of the step in
/// which the prefix ends.
KeyPath renamed_path(const KeyPath& path, const std::string& name, const std::string& new_name,
                     const std::vector<Rename>& renames) {
  if (name == new_name || path.empty()) return path;
  if (formats::spell(path) != name) return {};
  const auto rename = std::find_if(renames.begin(), renames.end(),
                                   [&](const Rename& r) { return name.starts_with(r.from); });
  std::string_view from = rename->from;
  std::string_view to = rename->to;
  KeyPath result;
  auto step = path.begin();
  for (; take_common_step(formats::spell({*step}), from, to); ++step) result.push_back(*step);
  std::string text = formats::spell({*step});
  for (; from.size() > text.size(); text = formats::spell({*step})) {
    from.remove_prefix(text.size() + 1);
    ++step;
  }
  const bool is_between_steps = from.empty() && (to.empty() || to.ends_with('.'));
  if (is_between_steps) {
    if (!to.empty()) result.emplace_back(std::string(to.substr(0, to.size() - 1)));
    result.push_back(*step);
  } else {
    result.emplace_back(std::string(to) + text.substr(from.size()));
  }
  result.insert(result.end(), step + 1, path.end());
  return result;
}

class Planner {
 public:
  Planner(const CheckpointContents& source, const std::string& source_path,
          const PlanOptions& options, const SourceGaps& gaps)
      : source_(source),
        source_path_(source_path),
        options_(options),
        traits_(formats::traits_of(options.format)),
        gaps_(gaps) {
    if (options_.optimizer == OptimizerSelection::leave_out) left_out_.emplace(source_);
  }

  Plan plan() {
    choose_layout_rule();
    choose_state_names();
    select_names();
    roles_ = classify_state(source_);
    plan_units();
    plan_.copies.reserve(selected_.size());
    WriterBalance balance(plan_.destination.world_size);
    for (const Selected& selected : selected_) plan_tensor(selected, balance);
    plan_values();
    plan_.destination.annotations = source_.annotations;
    sort_and_check_names();
    check_plan_names();
    return std::move(plan_);
  }

 private:
  /// A source tensor under its name at the destination.
  struct Selected {
    std::size_t source_tensor;
    std::string source_name;  // its own, or that of an alias which becomes a tensor
    bool has_torchrec_name;   // at the destination
    std::string name;
    KeyPath key_path;
  };

  [[noreturn]] static void refuse(std::string_view rule, std::string_view expected,
                                  std::string_view found, Remedy remedy = {}) {
    throw Error::expected(ErrorKind::invalid_argument, {}, rule, expected, found,
                          std::move(remedy));
  }

  void choose_layout_rule() {
    int& world_size = plan_.destination.world_size;
    const bool has_rule =
        options_.world_size != 0 || !options_.strategy.empty() || options_.table_plan;
    if (traits_.pieces == FormatTraits::Pieces::whole_tensors) {
      if (has_rule) {
        refuse("format " + std::string(options_.format.name()),
               "no world size, strategy or table plan, as it holds whole tensors", "one of them");
      }
      strategy_ = parse_strategy("replicated", 1);
      world_size = 1;
      return;
    }
    if (!has_rule) {
      world_size = std::max(1, source_.world_size);
      return;  // the pieces stay as they are
    }
    int wanted = options_.world_size;
    if (options_.table_plan) {
      if (wanted == 0) wanted = options_.table_plan->world_size;
      if (wanted != options_.table_plan->world_size) {
        refuse("world size",
               std::to_string(options_.table_plan->world_size) + ", as the table plan has",
               std::to_string(wanted));
      }
    }
    const bool is_hybrid = options_.strategy.starts_with("hybrid");
    if (wanted == 0 && !is_hybrid) wanted = std::max(1, source_.world_size);
    const std::string fallback = options_.table_plan ? "replicated" : "dim0";
    strategy_ = parse_strategy(options_.strategy.empty() ? fallback : options_.strategy, wanted);
    world_size = strategy_->world_size();
  }

  void choose_state_names() {
    if (options_.optimizer_names == OptimizerNames::as_stored) return;
    // torchrec's names repeat the name of the table, so they get its new name.
    const CheckpointContents contents = options_.renames.empty() ? source_ : renamed_source();
    std::vector<StateName> names =
        options_.optimizer_names == OptimizerNames::canonical
            ? canonical_names(contents)
            : torchrec_names(contents, options_.table_plan ? &*options_.table_plan : nullptr);
    for (StateName& name : names) state_names_.emplace(name.tensor_index, std::move(name));
  }

  CheckpointContents renamed_source() const {
    CheckpointContents contents = source_;
    for (TensorEntry& tensor : contents.tensors) {
      tensor.key_path = path_of(tensor.meta.fqn, tensor.key_path);
      tensor.meta.fqn = renamed(tensor.meta.fqn, options_.renames);
      if (!tensor.parameter.empty()) tensor.parameter = renamed(tensor.parameter, options_.renames);
    }
    for (Alias& alias : contents.aliases) {
      alias.fqn = renamed(alias.fqn, options_.renames);
      alias.target = renamed(alias.target, options_.renames);
    }
    return contents;
  }

  bool is_selected(std::string_view name) const {
    return options_.only.selects(name) && !(left_out_ && left_out_->contain(name));
  }

  void select_names() {
    std::map<std::string, std::size_t> place_of_target;  // selected tensors, by source name
    for (std::size_t i = 0; i < source_.tensors.size(); ++i) {
      const TensorEntry& tensor = source_.tensors[i];
      if (!is_selected(tensor.meta.fqn)) continue;
      place_of_target[tensor.meta.fqn] = select(i, tensor.meta.fqn, tensor.key_path);
    }
    for (const Alias& alias : source_.aliases) {
      if (!is_selected(alias.fqn)) continue;
      const auto target = place_of_target.find(alias.target);
      if (target != place_of_target.end() && traits_.holds_aliases) {
        plan_.destination.aliases.push_back({renamed(alias.fqn, options_.renames),
                                             selected_[target->second].name,
                                             path_of(alias.fqn, alias.key_path)});
        continue;
      }
      const TensorEntry* tensor = source_.find_tensor(alias.target);
      TESSERA_CHECK(tensor != nullptr);  // the reader checked it
      const std::size_t place = select(static_cast<std::size_t>(tensor - source_.tensors.data()),
                                       alias.fqn, alias.key_path);
      place_of_target.emplace(alias.target, place);
    }
    for (std::size_t i = 0; i < source_.values.size(); ++i) {
      if (is_selected(source_.values[i].name)) selected_values_.push_back(i);
    }
    report_missing_files(source_, options_.missing, report_);
    check_patterns();
    if (left_out_ && selected_.empty() && !source_.tensors.empty()) {
      report_.note("optimizer left out", "", "tensors beside those of optimizers", "none");
    }
  }

  /// Refuses patterns and prefixes that match no name: they are probably typing errors.
  void check_patterns() const {
    std::vector<std::string_view> names;
    for (const TensorEntry& tensor : source_.tensors) names.push_back(tensor.meta.fqn);
    for (const Alias& alias : source_.aliases) names.push_back(alias.fqn);
    for (const formats::ValueEntry& value : source_.values) names.push_back(value.name);
    for (const std::string& pattern : options_.only.unused(names)) {
      refuse("names to move", "a pattern that matches a name", "'" + printable(pattern) + "'");
    }
    const auto is_asked_for = [&](std::string_view name) { return options_.only.selects(name); };
    if (!options_.only.selects_everything() && std::ranges::none_of(names, is_asked_for)) {
      refuse("names to move", "patterns that together leave a name", "none left");
    }
    for (const Rename& rename : options_.renames) {
      const auto fits = [&](std::string_view name) {
        return name.starts_with(rename.from) && is_selected(name);
      };
      if (std::ranges::any_of(names, fits)) continue;
      refuse("rename", "a prefix of a name that is moved", "'" + printable(rename.from) + "'");
    }
  }

  std::size_t select(std::size_t source_tensor, const std::string& source_name,
                     const KeyPath& key_path) {
    Selected selected{source_tensor, source_name, false, renamed(source_name, options_.renames),
                      path_of(source_name, key_path)};
    const auto state_name = state_names_.find(source_tensor);
    const bool is_alias = source_name != source_.tensors[source_tensor].meta.fqn;
    if (state_name != state_names_.end() && !is_alias) {
      selected.name = state_name->second.fqn;
      selected.key_path = state_name->second.key_path;
    }
    selected.has_torchrec_name = has_torchrec_name(selected.name);
    selected_.push_back(std::move(selected));
    return selected_.size() - 1;
  }
  KeyPath path_of(const std::string& name, const KeyPath& key_path) const {
    return renamed_path(key_path, name, renamed(name, options_.renames), options_.renames);
  }

  void plan_units() {
    units_ = options_.units.empty() ? source_.units : options_.units;
    const bool is_flat = strategy_ && strategy_->sharding == Strategy::Sharding::flat;
    if (is_flat && units_.empty()) {
      refuse("strategy " + strategy_to_string(*strategy_), "flat units",
             "a source that records none", {Remedy::Action::give_units});
    }
    std::erase_if(units_, [&](FlatUnit& unit) { return !fits_source(unit); });
    unit_index_.emplace(units_);
    for (FlatUnit unit : units_) {
      bool are_all_selected = true;
      for (FlatUnitParameter& parameter : unit.parameters) {
        are_all_selected = are_all_selected && is_selected(parameter.fqn);
        parameter.fqn = renamed(parameter.fqn, options_.renames);
      }
      if (options_.cast && is_floating_point(unit.dtype)) unit.dtype = *options_.cast;
      if (are_all_selected) plan_.destination.units.push_back(std::move(unit));
    }
  }

  /// Checks a unit's parameters against the source.
  bool fits_source(const FlatUnit& unit) {
    bool fits = true;
    for (const FlatUnitParameter& parameter : unit.parameters) {
      const TensorEntry* tensor = find_source(parameter.fqn);
      if (tensor == nullptr) {
        report_.relaxable(options_.missing, "units", parameter.fqn, "a tensor of that name",
                          "none");
        fits = false;
      } else if (tensor->meta.shape != parameter.shape) {
        report_.problem("units", parameter.fqn, "shape " + shape_to_string(tensor->meta.shape),
                        shape_to_string(parameter.shape));
        fits = false;
      } else if (!options_.units.empty() && tensor->meta.dtype != unit.dtype) {
        report_.problem("units", parameter.fqn,
                        "dtype " + std::string(dtype_name(tensor->meta.dtype)),
                        std::string(dtype_name(unit.dtype)));
        fits = false;
      }
    }
    return fits;
  }

  const TensorEntry* find_source(const std::string& name) const {
    if (const TensorEntry* tensor = source_.find_tensor(name)) return tensor;
    for (const Alias& alias : source_.aliases) {
      if (alias.fqn == name) return source_.find_tensor(alias.target);
    }
    return nullptr;
  }

  void plan_tensor(const Selected& selected, WriterBalance& balance) {
    const TensorEntry& tensor = source_.tensors[selected.source_tensor];
    const StateRole& role = roles_[selected.source_tensor];
    if (is_bare_flat_vector(tensor.meta.fqn)) {
      report_.problem("flat vector", selected.source_name, "a layout that names its parameters",
                      "a bare flat vector of FSDP1", {Remedy::Action::give_flat_layout});
      return;
    }
    if (!has_sound_pieces(tensor, options_.missing, report_) ||
        !has_shape_of_kind(source_, tensor, role, report_)) {
      return;
    }
    const std::optional<PresentPieces> present = present_pieces(selected);
    if (present && !present->are_enough) return;

    if (role.is_misnamed) {
      report_.note("kind of state", selected.source_name,
                   "the shape of " + source_.tensors[*role.parameter_index].meta.fqn + ' ' +
                       shape_to_string(source_.tensors[*role.parameter_index].meta.shape) +
                       ", or of its rows, as the name says",
                   shape_to_string(tensor.meta.shape) + ", which is moved whole");
    }
    TensorEntry entry;
    entry.meta = {selected.name, tensor.meta.dtype, tensor.meta.shape};
    entry.kind = role.kind;
    entry.key_path = selected.key_path;
    if (role.parameter_index) {
      entry.parameter = renamed(source_.tensors[*role.parameter_index].meta.fqn, options_.renames);
    }
    TensorCopy copy{selected.source_tensor, {}, {}};
    if (!cast(entry) || !form_rows(selected, role, entry, copy)) return;

    const bool has_new_form = !copy.merged_widths.empty() || copy.num_repeated_rows != 0;
    if (strategy_ || has_new_form) {
      for (const Shard& shard : shards_for(selected, entry, role)) {
        const std::uint64_t nbytes = nbytes_of(shard.region, entry.meta.dtype);
        entry.pieces.push_back({shard.region, balance.choose(shard.ranks, nbytes)});
      }
    } else {
      keep_pieces(tensor, entry);
    }
    if (traits_.pieces == FormatTraits::Pieces::boxes) cut_into_boxes(entry);
    std::ranges::sort(entry.pieces, {}, &Piece::region);  // as writers that sort keep them
    find_sources(present ? present->tensor : tensor, entry, copy);
    if (present) present->restore_numbers(copy);
    plan_.nbytes_to_write += entry.meta.nbytes();
    plan_.destination.tensors.push_back(std::move(entry));
    plan_.copies.push_back(std::move(copy));
  }

  /// The rest of a tensor of which some pieces are missing.
  struct PresentPieces {
    TensorEntry tensor;                  // without the missing pieces
    std::vector<std::uint32_t> numbers;  // of its pieces in the source
    bool are_enough;

    /// Converts numbers of these pieces to numbers of the source's pieces.
    void restore_numbers(TensorCopy& copy) const {
      for (std::vector<std::uint32_t>& pieces : copy.source_pieces) {
        for (std::uint32_t& piece : pieces) piece = numbers[piece];
      }
    }
  };

  /// Returns none for a whole tensor; else reports what is missing.
  std::optional<PresentPieces> present_pieces(const Selected& selected) {
    const auto lost = gaps_.missing.pieces.find(selected.source_tensor);
    if (lost == gaps_.missing.pieces.end()) return std::nullopt;
    PresentPieces present{source_.tensors[selected.source_tensor], {}, false};
    std::vector<Piece> pieces = std::move(present.tensor.pieces);
    present.tensor.pieces.clear();
    std::set<std::string> files;
    for (std::uint32_t p = 0; p < pieces.size(); ++p) {
      const auto file = lost->second.find(p);
      if (file != lost->second.end()) {
        files.insert(file->second);
        continue;
      }
      present.tensor.pieces.push_back(std::move(pieces[p]));
      present.numbers.push_back(p);
    }
    present.are_enough =
        check_coverage(regions_of(present.tensor), present.tensor.meta.shape).empty();
    if (present.are_enough) {
      note_replaced(selected.source_name, files, report_);
    } else {
      report_missing_data(selected.source_name, files, options_.missing, report_);
    }
    return present;
  }

  bool cast(TensorEntry& entry) {
    const bool is_cast_kind = entry.kind == StateKind::plain ||
                              entry.kind == StateKind::pointwise ||
                              entry.kind == StateKind::row_wise;
    if (!options_.cast || !is_cast_kind || !is_floating_point(entry.meta.dtype)) return true;
    if (!can_cast(entry.meta.dtype, *options_.cast)) {
      report_.problem("cast", entry.meta.fqn,
                      "a dtype that casts to " + std::string(dtype_name(*options_.cast)),
                      std::string(dtype_name(entry.meta.dtype)));
      return false;
    }
    entry.meta.dtype = *options_.cast;
    return true;
  }

  /// Decides how many times the destination has a table's row-wise state: once for each column
  /// shard, or once. If the columns do not change, the state does not change. Several accumulators
  /// that become fewer are merged, which is lossy; one that becomes several is copied.
  bool form_rows(const Selected& selected, const StateRole& role, TensorEntry& entry,
                 TensorCopy& copy) {
    const bool is_per_shard = role.kind == StateKind::row_wise_per_shard;
    if ((!is_per_shard && role.kind != StateKind::row_wise) || !role.parameter_index) return true;
    const TensorEntry& tensor = source_.tensors[selected.source_tensor];
    const TensorEntry& table = source_.tensors[*role.parameter_index];
    const std::vector<std::int64_t> whole = column_widths({}, table.meta.shape);
    const auto from = is_per_shard ? column_widths(regions_of(table), table.meta.shape) : whole;
    if (is_per_shard && !has_rows_per_column_shard(tensor, table, from, report_)) return false;
    const auto to =
        is_kept_per_column_shard(selected, role) ? new_column_widths(*role.parameter_index) : whole;
    // The block order is that of the columns, so equal widths mean the same shards.
    if (from == to) return true;
    if (from.size() > 1) {
      if (!may_merge(tensor.meta.fqn, from.size(), options_.lossy, report_)) {
        return false;
      }
      copy.merged_widths = from;
    }
    const std::int64_t rows = table.meta.shape[0];
    const auto num_blocks = static_cast<std::int64_t>(to.size());
    entry.kind = to.size() > 1 ? StateKind::row_wise_per_shard : StateKind::row_wise;
    entry.meta.shape = {rows * num_blocks};
    if (to.size() > 1) copy.num_repeated_rows = rows;
    return true;
  }

  /// Returns whether state has one block of rows for each column shard of its table at the
  /// destination.
  bool is_kept_per_column_shard(const Selected& selected, const StateRole& role) const {
    return selected.has_torchrec_name || (role.kind == StateKind::row_wise_per_shard &&
                                          options_.optimizer_names == OptimizerNames::as_stored);
  }

  std::vector<std::int64_t> new_column_widths(std::size_t table_index) const {
    std::vector<Region> regions;
    for (const Shard& shard : parameter_shards(table_index)) regions.push_back(shard.region);
    return column_widths(regions, source_.tensors[table_index].meta.shape);
  }

  /// Returns the name of a table at the destination, which a table plan uses.
  std::optional<std::string> planned_table(const TensorEntry& tensor) const {
    return table_of_weight(renamed(tensor.meta.fqn, options_.renames));
  }

  std::vector<Shard> parameter_shards(std::size_t parameter_index) const {
    const TensorEntry& parameter = source_.tensors[parameter_index];
    if (!strategy_) return kept_shards(parameter);
    if (options_.table_plan) {
      if (const auto table = planned_table(parameter)) {
        const auto rule = options_.table_plan->tables.find(*table);
        if (rule != options_.table_plan->tables.end() && parameter.meta.shape.size() == 2) {
          return table_shards(rule->second, parameter.meta.shape, strategy_->world_size());
        }
      }
    }
    return shards_of(*strategy_, parameter.meta.shape, unit_index_->find(parameter.meta.fqn));
  }

  std::vector<Shard> shards_for(const Selected& selected, const TensorEntry& entry,
                                const StateRole& role) const {
    switch (entry.kind) {
      case StateKind::plain:
        return parameter_shards(selected.source_tensor);
      case StateKind::pointwise:
        return parameter_shards(role.parameter_index.value_or(selected.source_tensor));
      case StateKind::row_wise:
        if (!role.parameter_index) return parameter_shards(selected.source_tensor);
        return row_wise_shards(parameter_shards(*role.parameter_index),
                               source_.tensors[*role.parameter_index].meta.shape, entry.meta.shape);
      case StateKind::row_wise_per_shard:
        if (!role.parameter_index) break;
        return shards_of_row_blocks(parameter_shards(*role.parameter_index),
                                    source_.tensors[*role.parameter_index].meta.shape);
      case StateKind::scalar_parameter:
      case StateKind::scalar_table:
      case StateKind::opaque:
        break;
    }
    return shards_of({Strategy::Sharding::replicated, strategy_->world_size(), 1},
                     entry.meta.shape);
  }

  /// Returns the source's pieces, one of each set of replicas, on the first rank that has it.
  static std::vector<Shard> kept_shards(const TensorEntry& tensor) {
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

  static void keep_pieces(const TensorEntry& tensor, TensorEntry& entry) {
    for (Shard& shard : kept_shards(tensor)) {
      entry.pieces.push_back({std::move(shard.region), shard.ranks[0]});
    }
  }

  static void cut_into_boxes(TensorEntry& entry) {
    std::vector<Piece> pieces;
    for (Piece& piece : entry.pieces) {
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

  void plan_values() {
    for (const std::size_t i : selected_values_) {
      const formats::ValueEntry& value = source_.values[i];
      if (!can_give(i)) continue;
      plan_.destination.values.push_back(
          {renamed(value.name, options_.renames), path_of(value.name, value.key_path)});
      plan_.value_sources.push_back(i);
    }
  }

  /// Returns whether the source can deliver a value; if not, reports why.
  bool can_give(std::size_t value_index) {
    const std::string& name = source_.values[value_index].name;
    const auto lost = gaps_.missing.values.find(value_index);
    if (lost != gaps_.missing.values.end()) {
      report_missing_data(name, {lost->second}, options_.missing, report_);
      return false;
    }
    const auto refused = gaps_.refused_values.find(value_index);
    if (refused == gaps_.refused_values.end()) return true;
    ErrorWhere where = refused->second.where();
    where.fqn = name;
    report_.problem_at(where, "value", "a value of plain types",
                       std::string(refused->second.reason()),
                       {Remedy::Action::leave_out, glob_of(name)});
    return false;
  }

  /// Sorts two parallel lists by the first one's names.
  template <class Entry, class Other, class NameOf>
  static void sort_both(std::vector<Entry>& entries, std::vector<Other>& others, NameOf name_of) {
    std::vector<std::size_t> order(entries.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
      return name_of(entries[a]) < name_of(entries[b]);
    });
    std::vector<Entry> sorted_entries;
    std::vector<Other> sorted_others;
    for (const std::size_t i : order) {
      sorted_entries.push_back(std::move(entries[i]));
      sorted_others.push_back(std::move(others[i]));
    }
    entries = std::move(sorted_entries);
    others = std::move(sorted_others);
  }

  void sort_and_check_names() {
    CheckpointContents& destination = plan_.destination;
    sort_both(destination.tensors, plan_.copies,
              [](const TensorEntry& t) -> const std::string& { return t.meta.fqn; });
    sort_both(destination.values, plan_.value_sources,
              [](const formats::ValueEntry& v) -> const std::string& { return v.name; });
    std::sort(destination.aliases.begin(), destination.aliases.end(),
              [](const Alias& a, const Alias& b) { return a.fqn < b.fqn; });

    std::map<std::string_view, int> num_uses;
    for (const TensorEntry& tensor : destination.tensors) ++num_uses[tensor.meta.fqn];
    for (const formats::ValueEntry& value : destination.values) ++num_uses[value.name];
    for (const Alias& alias : destination.aliases) ++num_uses[alias.fqn];
    for (const auto& [name, count] : num_uses) {
      if (name.empty() && !options_.renames.empty()) {
        report_.problem("rename", "", "a name", "an empty one");
      }
      if (count == 1) continue;
      report_.problem("rename", std::string(name), "one entry of that name", std::to_string(count));
    }
    // Drop an alias if its tensor is left out.
    std::erase_if(destination.aliases, [&](const Alias& alias) {
      return destination.find_tensor(alias.target) == nullptr;
    });
    std::erase_if(destination.units, [&](const FlatUnit& unit) { return !is_there(unit); });
  }

  /// Says whether all parameters of a unit are at the destination.
  bool is_there(const FlatUnit& unit) const {
    const CheckpointContents& destination = plan_.destination;
    return std::ranges::all_of(unit.parameters, [&](const FlatUnitParameter& parameter) {
      return destination.find_tensor(parameter.fqn) != nullptr ||
             std::ranges::find(destination.aliases, parameter.fqn, &Alias::fqn) !=
                 destination.aliases.end();
    });
  }

  void check_plan_names() {
    if (!options_.table_plan) return;
    check_planned_tables_are_there();
    if (options_.strategy.empty()) check_tables_are_planned();
  }

  void check_planned_tables_are_there() {
    const auto& rules = options_.table_plan->tables;
    std::set<std::string> tables;
    for (const TensorEntry& tensor : source_.tensors) {
      auto table = planned_table(tensor);
      if (!table) continue;
      if (tensor.meta.shape.size() != 2 && rules.contains(*table)) {
        report_.problem("table plan", tensor.meta.fqn,
                        "2 dimensions, as the plan has a rule for it",
                        shape_to_string(tensor.meta.shape));
      }
      tables.insert(std::move(*table));
    }
    for (const auto& [name, rule] : rules) {
      if (!tables.contains(name)) {
        report_.relaxable(options_.missing, "table plan", name, "a table of that name", "none");
      }
    }
  }

  /// Reports tables that the plan does not name: each would otherwise be copied to every rank.
  void check_tables_are_planned() {
    for (const Selected& selected : selected_) {
      const TensorMeta& meta = source_.tensors[selected.source_tensor].meta;
      const auto table = planned_table(source_.tensors[selected.source_tensor]);
      if (!table || meta.shape.size() != 2 || options_.table_plan->tables.contains(*table))
        continue;
      report_.problem("table plan", meta.fqn,
                      "a rule for table " + *table + ", or a strategy for tables without one",
                      "neither", {Remedy::Action::give_strategy});
    }
  }

  const CheckpointContents& source_;
  const std::string& source_path_;
  const PlanOptions& options_;
  const FormatTraits traits_;  // of the destination's format
  const SourceGaps& gaps_;
  Plan plan_;
  PlanReport report_{plan_, source_path_};
  std::optional<OptimizerEntries> left_out_;
  std::optional<Strategy> strategy_;              // none: the pieces stay as they are
  std::map<std::size_t, StateName> state_names_;  // by tensor of the source
  std::vector<Selected> selected_;
  std::vector<std::size_t> selected_values_;
  std::vector<StateRole> roles_;
  std::vector<FlatUnit> units_;  // under the source's names
  std::optional<FlatUnitIndex> unit_index_;
};

}  // namespace

Plan plan_reshard(const CheckpointContents& source, const std::string& source_path,
                  const PlanOptions& options, const SourceGaps& gaps) {
  return Planner(source, source_path, options, gaps).plan();
}

std::string plan_digest(const Plan& plan, const CheckpointContents& source) {
  Sha256 hash;
  const auto add = [&](std::string_view text) {
    hash.update(std::as_bytes(std::span(text)));
    hash.update(std::as_bytes(std::span("\n", 1)));
  };
  const auto add_number = [&](auto number) { add(std::to_string(number)); };
  add_number(plan.destination.world_size);
  for (std::size_t i = 0; i < plan.destination.tensors.size(); ++i) {
    const TensorEntry& tensor = plan.destination.tensors[i];
    const TensorCopy& copy = plan.copies[i];
    add(tensor.meta.fqn);
    add(dtype_name(tensor.meta.dtype));
    add(shape_to_string(tensor.meta.shape));
    add(formats::state_kind_name(tensor.kind));
    add(source.tensors[copy.source_tensor].meta.fqn);
    for (const std::int64_t width : copy.merged_widths) add_number(width);
    if (copy.num_repeated_rows != 0) add_number(copy.num_repeated_rows);
    for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
      add(region_to_string(tensor.pieces[p].region));
      add_number(tensor.pieces[p].rank);
      for (const std::uint32_t piece : copy.source_pieces[p]) add_number(piece);
    }
  }
  for (std::size_t i = 0; i < plan.destination.values.size(); ++i) {
    add(plan.destination.values[i].name);
    add(source.values[plan.value_sources[i]].name);
  }
  for (const Alias& alias : plan.destination.aliases) {
    add(alias.fqn);
    add(alias.target);
  }
  return hash.hex_digest();
}

std::vector<RankShare> rank_shares(const Plan& plan) {
  std::vector<RankShare> shares(static_cast<std::size_t>(plan.destination.world_size));
  for (const TensorEntry& tensor : plan.destination.tensors) {
    for (const Piece& piece : tensor.pieces) {
      RankShare& share = shares[static_cast<std::size_t>(piece.rank)];
      ++share.num_pieces;
      share.nbytes += nbytes_of(piece.region, tensor.meta.dtype);
    }
  }
  return shares;
}

}  // namespace tessera::reshard
