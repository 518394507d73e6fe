#include "tessera/inspect/verify.h"

#include <algorithm>
#include <mutex>
#include <set>
#include <tuple>

#include "inspect/scan.h"
#include "inspect/statistics.h"

namespace tessera::inspect {
namespace {

using formats::Finding;

// Thrown on a stop request. It is no Error, because a reader's checks turn Errors into findings.
struct Stopped {};

std::uint64_t pieces_nbytes(const formats::CheckpointReader& reader) {
  std::uint64_t nbytes = 0;
  for (const auto& tensor : reader.contents().tensors) {
    for (const auto& piece : tensor.pieces) {
      nbytes += nbytes_of(piece.region, tensor.meta.dtype);
    }
  }
  return nbytes;
}

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
void check_values(const formats::CheckpointReader& reader,
                  const std::set<std::string, std::less<>>& names_with_findings,
                  const formats::FindingSink& sink) {
  const auto& contents = reader.contents();
  for (std::size_t v = 0; v < contents.values.size(); ++v) {
    if (names_with_findings.contains(contents.values[v].name)) continue;
    try {
      reader.read_value(v);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::io || error.kind() == ErrorKind::interrupted) throw;
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

// Reports NaN and infinities of each tensor. Reports a tensor that cannot be read, unless it
// already has a finding.
void check_numbers(const formats::CheckpointReader& reader,
                   const std::set<std::string, std::less<>>& names_with_findings,
                   const ScanOptions& options, const formats::FindingSink& sink) {
  for (std::size_t t = 0; t < reader.contents().tensors.size(); ++t) {
    const TensorMeta& meta = reader.contents().tensors[t].meta;
    if (!is_floating_point(meta.dtype) && !is_complex(meta.dtype)) continue;
    Statistics statistics;
    try {
      statistics = compute_statistics(reader, {&t, 1}, options).front();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::corruption) throw;
      if (!names_with_findings.contains(meta.fqn)) {
        sink({Finding::Severity::error, "structure", error.where(), "elements that can be read",
              std::string(error.reason())});
      }
      continue;
    }
    const std::int64_t num_infinite = statistics.num_positive_inf + statistics.num_negative_inf;
    if (statistics.num_nan == 0 && num_infinite == 0) continue;
    sink(
        {Finding::Severity::error,
         "finite",
         {reader.path(), meta.fqn, {}},
         std::to_string(statistics.numel) + " finite numbers",
         std::to_string(statistics.num_nan) + " NaN and " + std::to_string(num_infinite) + " Inf"});
  }
}

constexpr std::string_view kPartRule = "part";

void note_part(const formats::CheckpointReader& reader, const formats::FindingSink& sink) {
  if (!reader.contents().part) return;
  sink({.severity = Finding::Severity::note,
        .rule = std::string(kPartRule),
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

}  // namespace

bool VerifyReport::has_errors() const {
  return std::any_of(findings.begin(), findings.end(), [](const Finding& finding) {
    return finding.severity == Finding::Severity::error;
  });
}

VerifyReport verify(const formats::CheckpointReader& reader, const VerifyOptions& options) {
  VerifyReport report;
  std::mutex mutex;
  const formats::FindingSink sink = [&](const Finding& finding) {
    const std::scoped_lock lock(mutex);
    report.findings.push_back(finding);
  };
  note_part(reader, sink);
  check_coverage_of_all(reader, sink);
  check_aliases(reader, sink);
  check_units(reader, sink);
  note_opened_classes(reader, sink);
  try {
    const auto progress = [&](std::uint64_t nbytes) {
      if (options.scan.progress) options.scan.progress(nbytes);
      if (options.scan.stop.stop_requested()) throw Stopped();
    };
    reader.verify(sink, progress, options.scan.num_threads);
  } catch (const Stopped&) {
    detail::throw_if_stopped(options.scan);
  }
  std::set<std::string, std::less<>> names_with_findings;
  for (const Finding& finding : report.findings) names_with_findings.insert(finding.where.fqn);
  check_values(reader, names_with_findings, sink);
  if (options.numbers == VerifyOptions::Numbers::must_be_finite) {
    check_numbers(reader, names_with_findings, options.scan, sink);
  }
  std::stable_sort(report.findings.begin(), report.findings.end(),
                   [](const Finding& a, const Finding& b) {
                     return std::tie(a.where.path, a.where.fqn, a.rule) <
                            std::tie(b.where.path, b.where.fqn, b.rule);
                   });
  // The note that this is only a part of a checkpoint comes first.
  std::ranges::stable_partition(report.findings,
                                [](const Finding& finding) { return finding.rule == kPartRule; });
  for (const auto& tensor : reader.contents().tensors) {
    ++report.num_tensors;
    report.num_pieces += static_cast<std::int64_t>(tensor.pieces.size());
  }
  report.num_values = static_cast<std::int64_t>(reader.contents().values.size());
  report.nbytes = pieces_nbytes(reader);
  return report;
}

std::uint64_t verify_nbytes(const formats::CheckpointReader& reader, const VerifyOptions& options) {
  std::uint64_t nbytes = pieces_nbytes(reader);
  if (options.numbers == VerifyOptions::Numbers::must_be_finite) {
    for (const auto& tensor : reader.contents().tensors) {
      if (is_floating_point(tensor.meta.dtype) || is_complex(tensor.meta.dtype)) {
        nbytes += tensor.meta.nbytes();
      }
    }
  }
  return nbytes;
}

}  // namespace tessera::inspect
