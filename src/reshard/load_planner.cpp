#include "tessera/reshard/job_state.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "base/cast.h"
#include "base/unused_patterns.h"
#include "formats/per_rank_rules.h"
#include "reshard/optimizer_rules.h"
#include "reshard/piece_index.h"
#include "reshard/plan_report.h"
#include "reshard/quantized_cast.h"
#include "reshard/row_wise_merge_plan.h"
#include "reshard/row_wise_shards.h"
#include "reshard/source_check.h"
#include "reshard/state_key.h"
#include "reshard/torchrec_names.h"

namespace tessera::reshard {
namespace {

using formats::Alias;
using formats::CheckpointContents;
using formats::Piece;
using formats::StateKind;
using formats::TensorEntry;
using formats::ValueEntry;

bool is_row_wise(StateKind kind) {
  return kind == StateKind::row_wise || kind == StateKind::row_wise_per_shard;
}

class LoadPlanner {
 public:
  LoadPlanner(const CheckpointContents& source, const std::string& source_path,
              const CheckpointContents& wanted, int rank, const LoadPlanOptions& options)
      : source_(source),
        source_path_(source_path),
        wanted_(wanted),
        rank_(rank),
        options_(options),
        selection_(options.only),
        roles_(classify_state(source)) {}

  Plan plan() {
    TESSERA_CHECK(rank_ >= 0 && rank_ < wanted_.world_size);
    list_wanted_names();
    list_source_entries();
    check_patterns();
    report_missing_files(source_, options_.missing, report_);
    if (source_.part) {
      report_.relaxable(options_.missing, "part", "", "a whole checkpoint",
                        part_in_words(*source_.part));
    }
    plan_.destination.world_size = wanted_.world_size;
    note_opening_findings();
    for (const TensorEntry& tensor : wanted_.tensors) plan_tensor(tensor);
    for (const ValueEntry& value : wanted_.values) plan_value(value);
    report_unexpected();
    return std::move(plan_);
  }

 private:
  /// An entry of the source under one of its names.
  struct SourceEntry {
    enum class Kind { tensor, alias, value } kind;
    std::string name;
    std::size_t index;  // in the source's values, or in its tensors (of an alias: its tensor)
  };

  void list_wanted_names() {
    for (const TensorEntry& tensor : wanted_.tensors) wanted_names_.insert(tensor.meta.fqn);
    for (const ValueEntry& value : wanted_.values) wanted_names_.insert(value.name);
    for (const Alias& alias : wanted_.aliases) {
      wanted_names_.insert(alias.fqn);
      tied_names_.emplace(alias.target, alias.fqn);
    }
  }

  /// Repeats the notes of the checkpoint's reader about what is loaded, such as which of several
  /// differing replicas it reads.
  void note_opening_findings() {
    for (const formats::Finding& finding : source_.opening_findings) {
      if (finding.severity != formats::Finding::Severity::note) continue;
      const std::string name = formats::name_after_renames(finding.where.fqn, options_.renames);
      const bool is_loaded = wanted_names_.contains(name) && selection_.selects(name);
      if (!finding.where.fqn.empty() && !is_loaded) continue;
      report_.note_at(finding.where, finding.rule, finding.expected, finding.found);
    }
  }

  void list_source_entries() {
    using Kind = SourceEntry::Kind;
    const std::vector<StateName> canonical = canonical_names(source_);
    auto other_name = canonical.begin();
    for (std::size_t i = 0; i < source_.tensors.size(); ++i) {
      const std::string& fqn = source_.tensors[i].meta.fqn;
      const bool has_other = other_name != canonical.end() && other_name->tensor_index == i;
      const bool is_wanted_as_it_is =
          wanted_names_.contains(formats::name_after_renames(fqn, options_.renames));
      add_source_entry({Kind::tensor, fqn, i},
                       has_other && !is_wanted_as_it_is ? other_name->fqn : fqn);
      if (has_other) ++other_name;
    }
    for (const Alias& alias : source_.aliases) {
      const TensorEntry* target = source_.find_tensor(alias.target);
      TESSERA_CHECK(target != nullptr);  // the reader has checked that each alias has its tensor
      add_source_entry(
          {Kind::alias, alias.fqn, static_cast<std::size_t>(target - source_.tensors.data())},
          alias.fqn);
    }
    for (std::size_t i = 0; i < source_.values.size(); ++i) {
      add_source_entry({Kind::value, source_.values[i].name, i}, source_.values[i].name);
    }
  }

  /// Adds an entry of the source. `known_as` is its name before the renames.
  void add_source_entry(SourceEntry entry, const std::string& known_as) {
    std::string name = formats::name_after_renames(known_as, options_.renames);
    const bool is_selected = selection_.selects(name);
    const auto [it, is_new] = source_entries_.emplace(std::move(name), std::move(entry));
    if (is_new || !is_selected) return;
    report_.problem("rename", it->first, "one entry of that name",
                    "two (change the rules that give them one name)");
  }

  /// Refuses patterns and prefixes that match no name, because they are probably typing errors.
  /// Adds a note for each exclusion (`!GLOB`) that matches no name.
  void check_patterns() {
    const auto refuse = [](std::string_view rule, std::string_view expected,
                           const std::string& found) {
      throw Error::expected(ErrorKind::invalid_argument, {}, rule, expected,
                            "'" + printable(found) + "'");
    };
    std::vector<std::string_view> names(wanted_names_.begin(), wanted_names_.end());
    const auto not_wanted = tessera::detail::unused_patterns(options_.only, names).wanted;
    for (const std::string& pattern : not_wanted) {
      refuse("only", "a pattern that matches a name to load", pattern);
    }
    // Names that only the checkpoint has are excluded so that they are not unexpected.
    for (const auto& [name, entry] : source_entries_) names.push_back(name);
    for (const std::string& pattern : formats::unused_patterns(options_.only, names).exclusions) {
      report_.note_unused_exclusion("only", pattern);
    }
    for (const Rename& rename : options_.renames) {
      const auto fits = [&](const std::string& name) { return formats::fits_entry(rename, name); };
      const bool is_used = std::ranges::any_of(source_.aliases, fits, &Alias::fqn) ||
                           std::ranges::any_of(source_.values, fits, &ValueEntry::name) ||
                           std::ranges::any_of(source_.tensors, [&](const TensorEntry& tensor) {
                             return fits(tensor.meta.fqn);
                           });
      if (!is_used) refuse("renames", "a rule that fits a name in the checkpoint", rename.from);
    }
  }

  const SourceEntry* find_entry(std::string_view name) const {
    const auto it = source_entries_.find(name);
    return it == source_entries_.end() ? nullptr : &it->second;
  }

  void plan_tensor(const TensorEntry& wanted) {
    const SourceEntry* const found = find_source_tensor(wanted);
    if (found == nullptr) return;
    const TensorEntry& tensor = source_.tensors[found->index];
    const StateRole& role = roles_[found->index];
    if (is_bare_flat_vector(tensor.meta.fqn)) {
      report_flat_vector(tensor.meta.fqn, Relaxation::refuse);
      return;
    }
    TensorCopy copy{found->index, {}, {}};
    bool fits = has_sound_pieces(tensor, options_.missing, report_);
    fits = has_shape_of_kind(source_, tensor, role, report_) && fits;
    fits = has_kind(wanted, *found) && fits;
    fits = has_dtype(wanted, found->index) && fits;
    fits = has_shape(wanted, tensor, role, copy) && fits;
    if (!fits) return;

    TensorEntry entry = wanted;
    for (Piece& piece : entry.pieces.edit()) {
      piece.rank = rank_;
      plan_.nbytes_to_write += nbytes_of(piece.region, entry.meta.dtype);
    }
    find_sources(tensor, entry, copy);
    plan_.destination.tensors.push_back(std::move(entry));
    plan_.copies.push_back(std::move(copy));
  }

  /// Looks for the source tensor under all selected names of `wanted`, its own name first. Returns
  /// the first of them that the source has; nullptr if it has none.
  const SourceEntry* find_source_tensor(const TensorEntry& wanted) {
    std::vector<std::string_view> names = {wanted.meta.fqn};
    const auto [begin, end] = tied_names_.equal_range(wanted.meta.fqn);
    for (auto it = begin; it != end; ++it) names.push_back(it->second);

    const SourceEntry* found = nullptr;
    for (const std::string_view name : names) {
      if (!options_.only.selects(name)) continue;
      const SourceEntry* entry = find_entry(name);
      if (entry == nullptr) {
        report_.relaxable(options_.missing, "missing", std::string(name), "a tensor of that name",
                          "none");
      } else if (entry->kind == SourceEntry::Kind::value) {
        report_.problem("kind of entry", std::string(name), "a tensor", "a value");
      } else if (found == nullptr) {
        found = entry;
      } else if (entry->index != found->index) {
        // The source stores both names of a tied tensor. Only the first is read. If the shapes
        // differ, the names cannot be tied.
        const Shape& shape = source_.tensors[entry->index].meta.shape;
        if (shape != wanted.meta.shape) report_shape(std::string(name), wanted.meta.shape, shape);
      }
    }
    return found;
  }

  bool has_kind(const TensorEntry& wanted, const SourceEntry& found) {
    const TensorEntry& tensor = source_.tensors[found.index];
    const StateRole& role = roles_[found.index];
    if (wanted.kind == tensor.kind || wanted.kind == role.kind) return true;
    // A tied tensor has the kind of its first name. Another name may have another kind: a step
    // counter that is also a value of the trainer.
    if (found.kind == SourceEntry::Kind::alias && wanted.meta.shape == tensor.meta.shape)
      return true;
    // A Python job does not know all names of its checkpoint. What proves a name to be state may be
    // a value, or not be loaded (StateRoots).
    if (wanted.kind == StateKind::plain && behind_state(wanted.meta.fqn)) return true;
    // Opaque state may be anything, so it fits every kind. Column shards are compared later, with
    // the shape.
    if (wanted.kind == StateKind::opaque || role.kind == StateKind::opaque) return true;
    if (is_row_wise(wanted.kind) && is_row_wise(role.kind)) return true;
    report_.problem("kind of state", wanted.meta.fqn, std::string(state_kind_name(wanted.kind)),
                    std::string(state_kind_name(role.kind)) + " (from another optimizer?)");
    return false;
  }

  bool has_dtype(const TensorEntry& wanted, std::size_t source_tensor) {
    const TensorEntry& tensor = source_.tensors[source_tensor];
    const DType to = wanted.meta.dtype;
    const DType from = tensor.meta.dtype;
    if (from == to) return true;
    const bool is_castable = is_floating_point(from) && is_floating_point(to) && can_cast(from, to);
    report_.relaxable(is_castable ? options_.cast : Relaxation::refuse, "dtype", wanted.meta.fqn,
                      std::string(dtype_name(to)), std::string(dtype_name(from)));
    if (!is_castable || options_.cast == Relaxation::refuse) return is_castable;
    if (!quantized_) quantized_.emplace(source_);
    return is_no_quantized_part(*quantized_, source_tensor, wanted.meta.fqn, to, {}, report_);
  }

  bool has_shape(const TensorEntry& wanted, const TensorEntry& tensor, const StateRole& role,
                 TensorCopy& copy) {
    if (is_row_wise(wanted.kind) && role.kind == StateKind::row_wise_per_shard &&
        role.parameter_index) {
      const TensorEntry& table = source_.tensors[*role.parameter_index];
      if (table.meta.shape.size() != 2) return false;  // has_shape_of_kind has reported it
      return plan_column_shards(wanted, tensor, table, copy);
    }
    if (wanted.meta.shape == tensor.meta.shape) return true;
    report_shape(wanted.meta.fqn, wanted.meta.shape, tensor.meta.shape);
    return false;
  }

  /// Plans row-wise state that a table has once for each of its column shards. The state is copied
  /// if the job has the same column shards. It is merged if the job has one number per row. Reports
  /// a problem and returns false if the shapes do not fit, if the column shards differ, or if a
  /// merge is needed but not allowed.
  bool plan_column_shards(const TensorEntry& wanted, const TensorEntry& tensor,
                          const TensorEntry& table, TensorCopy& copy) {
    const auto widths = column_widths(regions_of(table), table.meta.shape);
    if (!has_rows_per_column_shard(tensor, table, widths, report_)) return false;
    const bool is_merged = wanted.kind == StateKind::row_wise && widths.size() > 1;
    const Shape shape = is_merged ? Shape{table.meta.shape[0]} : tensor.meta.shape;
    if (wanted.meta.shape != shape) {
      report_shape(wanted.meta.fqn, wanted.meta.shape, shape);
      return false;
    }
    if (is_merged) {
      copy.merged_widths = widths;
      return may_merge(wanted.meta.fqn, widths.size(), options_.lossy, report_);
    }
    const TensorEntry* wanted_table = wanted_.find_tensor(wanted.parameter);
    if (wanted_table == nullptr || is_cut_by_columns(*wanted_table, widths)) return true;
    report_.problem(kColumnShardRule, wanted.meta.fqn, "the same column shards at the destination",
                    "other column shards");
    return false;
  }

  /// Returns whether every piece of a table has exactly the columns of one column shard.
  static bool is_cut_by_columns(const TensorEntry& table, const std::vector<std::int64_t>& widths) {
    std::map<std::int64_t, std::int64_t> width_at;  // number of columns, by column offset
    std::int64_t offset = 0;
    for (const std::int64_t width : widths) {
      width_at.emplace(offset, width);
      offset += width;
    }
    return std::ranges::all_of(table.pieces, [&](const Piece& piece) {
      if (numel_of(piece.region) == 0) return true;
      const auto* box = std::get_if<Box>(&piece.region);
      if (box == nullptr || box->sizes.size() != 2) return widths.size() == 1;
      const auto shard = width_at.find(box->offsets[1]);
      return shard != width_at.end() && shard->second == box->sizes[1];
    });
  }

  void plan_value(const ValueEntry& wanted) {
    if (!options_.only.selects(wanted.name)) return;
    const SourceEntry* entry = find_entry(wanted.name);
    if (entry == nullptr) {
      report_.relaxable(options_.missing, "missing", wanted.name, "a value of that name", "none");
    } else if (entry->kind != SourceEntry::Kind::value) {
      report_.problem("kind of entry", wanted.name, "a value", "a tensor");
    } else {
      plan_.destination.values.push_back(wanted);
      plan_.value_sources.push_back(entry->index);
    }
  }

  void report_unexpected() {
    for (const auto& [name, entry] : source_entries_) {
      if (wanted_names_.contains(name) || !selection_.selects(name)) continue;
      if (entry.kind == SourceEntry::Kind::tensor && is_bare_flat_vector(entry.name)) {
        report_flat_vector(entry.name, options_.unexpected);
        continue;
      }
      constexpr std::string_view kFound[] = {"a tensor", "an alias", "a value"};
      report_.relaxable(options_.unexpected, "unexpected", entry.name, "nothing of that name",
                        std::string(kFound[static_cast<std::size_t>(entry.kind)]));
    }
  }

  void report_flat_vector(const std::string& fqn, Relaxation relaxation) {
    report_.relaxable(relaxation, "flat vector", fqn, "a layout that names its parameters",
                      "a flat vector of FSDP1 without a layout",
                      {Remedy::Action::give_flat_layout});
  }

  void report_shape(std::string fqn, const Shape& expected, const Shape& found) {
    report_.problem("shape", std::move(fqn), shape_to_string(expected), shape_to_string(found));
  }

  const CheckpointContents& source_;
  const std::string& source_path_;
  const CheckpointContents& wanted_;
  const int rank_;
  const LoadPlanOptions& options_;
  const formats::EntrySelection selection_;             // of `options_.only`
  const std::vector<StateRole> roles_;                  // one per tensor of the source
  std::optional<formats::QuantizedTensors> quantized_;  // only if the dtype of a tensor differs
  Plan plan_;
  PlanReport report_{plan_, source_path_};
  std::set<std::string_view> wanted_names_;
  // The other names of tied tensors, by the name under which the tensor is stored.
  std::multimap<std::string_view, std::string_view> tied_names_;
  std::map<std::string, SourceEntry, std::less<>> source_entries_;  // by the name after the renames
};

}  // namespace

Plan plan_load(const CheckpointContents& source, const std::string& source_path,
               const CheckpointContents& wanted, int rank, const LoadPlanOptions& options) {
  return LoadPlanner(source, source_path, wanted, rank, options).plan();
}

std::string problems_to_string(const std::vector<formats::Finding>& problems,
                               std::size_t max_lines) {
  std::string text;
  for (std::size_t i = 0; i < std::min(problems.size(), max_lines); ++i) {
    if (i != 0) text += '\n';
    text += formats::finding_to_string(problems[i]);
  }
  if (problems.size() > max_lines) {
    if (!text.empty()) text += '\n';
    text += "and " + std::to_string(problems.size() - max_lines) + " more";
  }
  return text;
}

}  // namespace tessera::reshard
