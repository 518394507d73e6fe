#include "tessera/inspect/verify.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <tuple>

#include "base/outside_failure.h"
#include "formats/part_of_check.h"
#include "inspect/scan.h"
#include "inspect/selection_part.h"
#include "inspect/statistics.h"
#include "inspect/verify_parts.h"

namespace tessera::inspect {
namespace {

using formats::Finding;
using Stage = FindingOfPart::Stage;
using Names = std::set<std::string, std::less<>>;

// Thrown on a stop request. It is no Error, because a reader's checks turn Errors into findings.
struct Stopped {};

void check_coverage_of_all(const formats::CheckpointReader& reader,
                           const formats::FindingSink& sink) {
  for (const auto& tensor : reader.contents().tensors) {
    std::vector<Region> regions;
    for (const auto& piece : tensor.pieces) regions.push_back(piece.region);
    for (const CoverageProblem& problem : check_coverage(regions, tensor.meta.shape)) {
      sink({Finding::Severity::error,
            "coverage",
            {reader.path(), tensor.meta.fqn, {}},
            "every element in exactly one piece",
            problem.detail});
    }
  }
}

void check_units(const formats::CheckpointReader& reader, const formats::FindingSink& sink) {
  for (const FlatUnit& unit : reader.contents().units) {
    for (const FlatUnitParameter& parameter : unit.parameters) {
      const auto* const tensor = reader.contents().find_tensor(parameter.fqn);
      if (tensor != nullptr && tensor->meta.shape == parameter.shape) continue;
      const bool is_alias =
          std::ranges::find(reader.contents().aliases, parameter.fqn, &formats::Alias::fqn) !=
          reader.contents().aliases.end();
      if (is_alias) continue;
      sink({Finding::Severity::error,
            "units",
            {reader.path(), parameter.fqn, {}},
            "a tensor of shape " + shape_to_string(parameter.shape) + ", as unit '" +
                printable(unit.name) + "' has it",
            tensor == nullptr ? "no tensor of this name" : shape_to_string(tensor->meta.shape)});
    }
  }
}

// Checks that values can be read. Skips values that already have findings.
void check_values(const formats::CheckpointReader& reader, const Names& names_with_findings,
                  const formats::FindingSink& sink) {
  const auto& contents = reader.contents();
  for (std::size_t v = 0; v < contents.values.size(); ++v) {
    if (names_with_findings.contains(contents.values[v].name)) continue;
    try {
      reader.read_value(v);
    } catch (const Error& error) {
      if (tessera::detail::is_outside_failure(error)) throw;
      ErrorWhere where = error.where();
      if (where.path.empty()) where.path = reader.path();
      where.fqn = contents.values[v].name;
      const bool is_refused = error.kind() == ErrorKind::unsupported;
      sink({is_refused ? Finding::Severity::note : Finding::Severity::error, "value", where,
            is_refused ? "a value of plain types" : "a value that can be read",
            std::string(error.reason())});
    }
  }
}

void check_aliases(const formats::CheckpointReader& reader, const formats::FindingSink& sink) {
  const auto& contents = reader.contents();
  for (const auto& alias : contents.aliases) {
    if (contents.find_tensor(alias.target) != nullptr) continue;
    sink({Finding::Severity::error,
          "alias",
          {reader.path(), alias.fqn, {}},
          "a tensor named '" + printable(alias.target) + "'",
          "none"});
  }
}

bool has_numbers(const TensorMeta& meta) {
  return is_floating_point(meta.dtype) || is_complex(meta.dtype);
}

// Returns the tensors in which part `index` looks for NaN and infinities; none if the options allow
// these numbers.
std::vector<std::size_t> tensors_with_numbers(const formats::CheckpointReader& reader,
                                              const VerifyOptions& options, int index,
                                              int num_parts) {
  Selection selection;
  if (options.numbers == VerifyOptions::Numbers::any) return {};
  for (std::size_t t = 0; t < reader.contents().tensors.size(); ++t) {
    if (has_numbers(reader.contents().tensors[t].meta)) selection.tensors.push_back(t);
  }
  return part_of_selection(reader.contents(), selection, index, num_parts).tensors;
}

// Returns a finding if a tensor has NaN or infinities, or cannot be read.
std::optional<FindingOfPart> check_numbers(const formats::CheckpointReader& reader, std::size_t t,
                                           const ScanOptions& options) {
  const TensorMeta& meta = reader.contents().tensors[t].meta;
  Statistics statistics;
  try {
    statistics = compute_statistics(reader, {&t, 1}, options).front();
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::corruption) throw;
    const Finding finding{Finding::Severity::error, "structure", error.where(),
                          "elements that can be read", std::string(error.reason())};
    return FindingOfPart{
        .finding = finding, .stage = Stage::numbers, .unit = t, .is_only_first = true};
  }
  const std::int64_t num_infinite = statistics.num_positive_inf + statistics.num_negative_inf;
  if (statistics.num_nan == 0 && num_infinite == 0) return std::nullopt;
  const Finding finding{
      Finding::Severity::error,
      "finite",
      {reader.path(), meta.fqn, {}},
      std::to_string(statistics.numel) + " finite numbers",
      std::to_string(statistics.num_nan) + " NaN and " + std::to_string(num_infinite) + " Inf"};
  return FindingOfPart{.finding = finding, .stage = Stage::numbers, .unit = t};
}

void note_part(const formats::CheckpointReader& reader, const formats::FindingSink& sink) {
  if (!reader.contents().part) return;
  sink({.severity = Finding::Severity::note,
        .rule = std::string(kRuleOfPart),
        .where = {.path = reader.path()},
        .expected = "a whole checkpoint",
        .found = part_in_words(*reader.contents().part)});
}

void note_opened_classes(const formats::CheckpointReader& reader,
                         const formats::FindingSink& sink) {
  for (const formats::OpenedClass& opened : reader.contents().opened_classes) {
    sink({.severity = Finding::Severity::note,
          .rule = "class",
          .where = {.path = reader.path()},
          .expected = "values of plain types",
          .found = opened_class_in_words(opened)});
  }
}

// Checks what the reader found on opening, without reading elements.
void check_contents(const formats::CheckpointReader& reader, const formats::FindingSink& sink) {
  note_part(reader, sink);
  check_coverage_of_all(reader, sink);
  check_aliases(reader, sink);
  check_units(reader, sink);
  note_opened_classes(reader, sink);
}

void check_stored_bytes(const formats::CheckpointReader& reader, const ScanOptions& options,
                        formats::PartOfCheck& part, const formats::FindingSink& sink) {
  std::mutex mutex;
  const formats::FindingSink one_by_one = [&](const Finding& finding) {
    const std::scoped_lock lock(mutex);
    sink(finding);
  };
  try {
    const auto progress = [&](std::uint64_t nbytes) {
      if (options.progress) options.progress(nbytes);
      if (options.stop.stop_requested()) throw Stopped();
    };
    formats::verify_part(reader, one_by_one, progress, options.num_threads, part);
  } catch (const Stopped&) {
  }
  // After a stop request, a server's files cannot be read any more. Such a failure is no finding.
  detail::throw_if_stopped(options);
}

}  // namespace

bool VerifyReport::has_errors() const {
  return std::ranges::any_of(findings, [](const Finding& finding) {
    return finding.severity == Finding::Severity::error;
  });
}

PartOfVerify verify_part(const formats::CheckpointReader& reader, const VerifyOptions& options,
                         int index, int num_parts) {
  PartOfVerify result{.index = index, .num_parts = num_parts, .numbers = options.numbers};
  formats::PartOfCheck part =
      num_parts == 1 ? formats::PartOfCheck() : formats::PartOfCheck(index, num_parts);
  const auto add_to = [&](Stage stage) {
    return [&result, &part, stage](const Finding& finding) {
      result.findings.push_back({.finding = finding,
                                 .stage = stage,
                                 .unit = stage == Stage::stored_bytes ? part.num_units() : 0,
                                 .is_only_first = stage == Stage::values});
    };
  };
  const bool is_first = index == 0;
  if (is_first) check_contents(reader, add_to(Stage::contents));
  check_stored_bytes(reader, options.scan, part, add_to(Stage::stored_bytes));
  result.notes = part.notes();
  if (is_first) {
    Names names;
    for (const FindingOfPart& each : result.findings) names.insert(each.finding.where.fqn);
    check_values(reader, names, add_to(Stage::values));
  }
  for (const std::size_t t : tensors_with_numbers(reader, options, index, num_parts)) {
    if (auto found = check_numbers(reader, t, options.scan)) result.findings.push_back(*found);
  }
  return result;
}

VerifyReport verify(const formats::CheckpointReader& reader, const VerifyOptions& options) {
  return join_parts({verify_part(reader, options, 0, 1)}, reader);
}

std::uint64_t verify_nbytes(const formats::CheckpointReader& reader, const VerifyOptions& options) {
  std::uint64_t nbytes = 0;
  for (const auto& tensor : reader.contents().tensors) nbytes += pieces_nbytes(tensor);
  for (const std::size_t t : tensors_with_numbers(reader, options, 0, 1)) {
    nbytes += reader.contents().tensors[t].meta.nbytes();
  }
  return nbytes;
}

std::uint64_t verify_part_nbytes(const formats::CheckpointReader& reader,
                                 const VerifyOptions& options, int index, int num_parts) {
  formats::PartOfCheck part = formats::PartOfCheck::planned(index, num_parts);
  check_stored_bytes(reader, {.num_threads = 1}, part, [](const Finding&) {});
  std::uint64_t nbytes = part.nbytes();
  for (const std::size_t t : tensors_with_numbers(reader, options, index, num_parts)) {
    nbytes += reader.contents().tensors[t].meta.nbytes();
  }
  return nbytes;
}

}  // namespace tessera::inspect
