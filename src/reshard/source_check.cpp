#include "reshard/source_check.h"

#include "reshard/piece_index.h"

namespace tessera::reshard {

using formats::CheckpointContents;
using formats::StateKind;
using formats::TensorEntry;

bool is_bare_flat_vector(std::string_view fqn) {
  const std::size_t dot = fqn.rfind('.');
  const std::string_view name = dot == std::string_view::npos ? fqn : fqn.substr(dot + 1);
  return name == "_flat_param" || name.starts_with("flat_param_");
}

void report_missing_files(const CheckpointContents& source, Relaxation missing,
                          PlanReport& report) {
  for (const std::string& file : source.missing_files) {
    report.relaxable(missing, "structure", "",
                     "the file " + printable(file) + " that the checkpoint lists", "none");
  }
}

namespace {

/// Returns `the file a that the checkpoint lists`, or the first of several names and the number of
/// the others.
std::string files_in_words(const std::set<std::string>& files) {
  constexpr std::size_t kMaxNames = 3;
  std::string text;
  std::size_t num_names = 0;
  for (const std::string& file : files) {
    if (num_names == kMaxNames) break;
    text += (num_names++ == 0 ? "" : ", ") + printable(file);
  }
  if (files.size() > kMaxNames)
    text += " and " + std::to_string(files.size() - kMaxNames) + " more";
  return (files.size() == 1 ? "the file " : "the files ") + text + " that the checkpoint lists";
}

}  // namespace

void report_missing_data(const std::string& fqn, const std::set<std::string>& files,
                         Relaxation missing, PlanReport& report) {
  report.relaxable(missing, "structure", fqn, files_in_words(files), "none");
}

void note_replaced(const std::string& fqn, const std::set<std::string>& files, PlanReport& report) {
  report.note("structure", fqn, files_in_words(files),
              "none, but other files have copies of all its data");
}

SourceGaps find_gaps(const formats::CheckpointReader& reader, const NameSelection& names) {
  SourceGaps gaps{reader.find_missing_data(), {}};
  const auto& values = reader.contents().values;
  for (std::size_t v = 0; v < values.size(); ++v) {
    if (!names.selects(values[v].name) || gaps.missing.values.contains(v)) continue;
    try {
      reader.read_value(v);
    } catch (const Error& error) {
      // Other errors of the value are reported when the move reads it.
      if (error.kind() == ErrorKind::unsupported) gaps.refused_values.emplace(v, error);
    }
  }
  return gaps;
}

bool has_sound_pieces(const TensorEntry& tensor, Relaxation missing, PlanReport& report) {
  bool is_sound = true;
  for (const CoverageProblem& found : check_coverage(regions_of(tensor), tensor.meta.shape)) {
    is_sound = false;
    if (found.kind == CoverageProblem::Kind::hole) {
      report.relaxable(missing, "coverage", tensor.meta.fqn, "every element in a piece",
                       found.detail);
    } else {
      report.problem("coverage", tensor.meta.fqn, "every element once", found.detail);
    }
  }
  return is_sound;
}

bool has_shape_of_kind(const CheckpointContents& source, const TensorEntry& tensor,
                       const StateRole& role, PlanReport& report) {
  if (!role.parameter_index) return true;
  const TensorEntry& parameter = source.tensors[*role.parameter_index];
  const Shape& shape = parameter.meta.shape;
  const Shape& found = tensor.meta.shape;
  switch (role.kind) {
    case StateKind::pointwise:
      if (found == shape) return true;
      break;
    case StateKind::row_wise:
      if (!shape.empty() && !found.empty() && found[0] == shape[0]) return true;
      break;
    case StateKind::row_wise_per_shard:
      if (shape.size() == 2 && found.size() == 1) return true;
      break;
    default:
      return true;
  }
  report.problem("kind of state", tensor.meta.fqn,
                 "a shape that is " + std::string(state_kind_name(role.kind)) + " for " +
                     parameter.meta.fqn + " " + shape_to_string(shape),
                 shape_to_string(found));
  return false;
}

bool has_rows_per_column_shard(const TensorEntry& tensor, const TensorEntry& table,
                               std::span<const std::int64_t> widths, PlanReport& report) {
  const Shape blocks = {table.meta.shape[0] * static_cast<std::int64_t>(widths.size())};
  if (tensor.meta.shape == blocks) return true;
  report.problem(kColumnShardRule, tensor.meta.fqn,
                 "shape " + shape_to_string(blocks) + ", rows of " + table.meta.fqn +
                     " times its column shards",
                 shape_to_string(tensor.meta.shape));
  return false;
}

bool may_merge(const std::string& fqn, std::size_t num_shards, Relaxation lossy,
               PlanReport& report) {
  if (lossy == Relaxation::allow) {
    report.note("merged", fqn, "one row-wise accumulator",
                std::to_string(num_shards) + " of them, merged by a weighted mean");
    return true;
  }
  report.problem(kColumnShardRule, fqn, "the same column shards at the destination",
                 "other column shards", {Remedy::Action::allow_lossy});
  return false;
}

}  // namespace tessera::reshard
