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

void report_part(const CheckpointContents& source, Relaxation part, PlanReport& report) {
  if (!source.part) return;
  const char* const expected = "a whole checkpoint";
  if (part == Relaxation::allow) {
    report.note("part", "", expected, part_in_words(*source.part));
  } else {
    report.problem("part", "", expected, part_in_words(*source.part), {Remedy::Action::take_as_is});
  }
}

void report_opening_findings(const CheckpointContents& source, Relaxation missing,
                             PlanReport& report) {
  for (const formats::Finding& finding : source.opening_findings) {
    if (finding.severity == formats::Finding::Severity::error && missing == Relaxation::refuse) {
      report.problem_at(finding.where, finding.rule, finding.expected, finding.found,
                        finding.remedy);
    } else {
      report.note_at(finding.where, finding.rule, finding.expected, finding.found);
    }
  }
}

void note_opened_classes(const CheckpointContents& source, PlanReport& report) {
  for (const formats::OpenedClass& opened : source.opened_classes) {
    report.note("class", "", "values of plain types", opened_class_in_words(opened));
  }
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

}  // namespace tessera::reshard
