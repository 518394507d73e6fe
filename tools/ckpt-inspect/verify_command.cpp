#include "ckpt-inspect/verify_command.h"

#include "base/json.h"
#include "base/size_text.h"
#include "ckpt-inspect/part_document.h"
#include "cli/command_line_remedies.h"
#include "cli/json_output.h"
#include "cli/part_option.h"
#include "inspect/verify_parts.h"
#include "tessera/inspect/verify.h"

namespace tessera::cli {
namespace {

using formats::Finding;

constexpr const char* kHelpCommand = "ckpt-inspect verify --help";

std::int64_t count_of(const inspect::VerifyReport& report, Finding::Severity severity) {
  std::int64_t count = 0;
  for (const Finding& finding : report.findings) count += finding.severity == severity ? 1 : 0;
  return count;
}

void print_json(const formats::CheckpointReader& reader, const inspect::VerifyReport& report,
                Terminal& terminal) {
  JsonOutput json(terminal, kInspectJsonSchema);
  json.member("format", reader.format().name()).member("sound", !report.has_errors());
  json.member("tensors", report.num_tensors).member("pieces", report.num_pieces);
  json.member("values", report.num_values).member("nbytes", report.nbytes);
  write_shared_nbytes(json, reader);
  json.key("findings").begin_array();
  for (const Finding& finding : report.findings) {
    json.begin_object();
    json.member("severity", finding.severity == Finding::Severity::error ? "error" : "note");
    json.member("rule", finding.rule).member("file", finding.where.path);
    json.member("name", finding.where.fqn);
    if (const auto& range = finding.where.byte_range) {
      json.key("byte_range").begin_array().value(range->begin).value(range->end).end_array();
    }
    json.member("expected", finding.expected).member("found", finding.found).end_object();
  }
  json.end_array();
  json.finish();
}

void print_text(const formats::CheckpointReader& reader, const inspect::VerifyReport& report,
                Terminal& terminal) {
  for (const Finding& finding : report.findings) {
    const bool is_error = finding.severity == Finding::Severity::error;
    terminal.print(
        terminal.styled(is_error ? Style::bad : Style::notice, is_error ? "error: " : "note: ") +
        finding_line(finding) + "\n");
  }
  const std::int64_t num_errors = count_of(report, Finding::Severity::error);
  const std::int64_t num_notes = count_of(report, Finding::Severity::note);
  std::string verdict =
      num_errors == 0
          ? terminal.styled(Style::good, "sound")
          : terminal.styled(Style::bad, counted(static_cast<std::uint64_t>(num_errors), "error"));
  if (num_notes > 0) verdict += ", " + counted(static_cast<std::uint64_t>(num_notes), "note");
  terminal.print(verdict + ": " +
                 counted(static_cast<std::uint64_t>(report.num_tensors), "tensor") + " in " +
                 counted(static_cast<std::uint64_t>(report.num_pieces), "piece") + ", " +
                 counted(static_cast<std::uint64_t>(report.num_values), "value") + ", " +
                 exact_size(report.nbytes) + "; " + format_in_words(reader) + "\n");
}

// Checks one part, and prints what it found for --join.
ExitCode run_part(const VerifyCommandOptions& options, inspect::VerifyOptions verify_options,
                  const formats::CheckpointReader& reader, Terminal& terminal) {
  const auto [index, num_parts] = parse_part("--part", options.part, kHelpCommand);
  const PartFiles files = files_of_part(reader);
  inspect::PartOfVerify part;
  {
    Work work(terminal, "verify",
              inspect::verify_part_nbytes(reader, verify_options, index, num_parts), options.work);
    verify_options.scan = work.scan_options();
    part = inspect::verify_part(reader, verify_options, index, num_parts);
  }
  require_sources_unchanged();
  JsonOutput json(terminal, kInspectJsonSchema);
  json.member("format", reader.format().name());
  for (const auto& [key, content] : inspect::part_of_verify_to_value(part, reader)) {
    json.key(key.get<std::string>());
    const auto* const list = content.get_if<Value::List>();
    if (list == nullptr) {
      json.raw(value_to_json(content));
      continue;
    }
    json.begin_array();
    for (const Value& item : *list) json.raw(value_to_json(item));
    json.end_array();
  }
  write_files_of_part(json, files);
  json.finish();
  return part.has_errors() ? ExitCode::findings : ExitCode::done;
}

inspect::VerifyReport join(const VerifyCommandOptions& options,
                           const formats::CheckpointReader& reader,
                           inspect::VerifyOptions::Numbers numbers) {
  std::vector<inspect::PartDocument> documents;
  for (const std::string& path : options.joined_paths) {
    documents.push_back({path, read_part_document(path, "part of a check", "verify")});
  }
  inspect::VerifyReport report = inspect::join_verify_documents(documents, reader, numbers);
  const PartFiles files = files_of_part(reader);
  for (const auto& [path, document] : documents) require_files(document, path, files);
  return report;
}

void check_options(const VerifyCommandOptions& options) {
  if (options.part.empty()) return;
  if (!options.joined_paths.empty()) {
    throw UsageError("--part: expected either --part or --join, found both", kHelpCommand);
  }
  require_json_of_part(options.json, kHelpCommand);
}

}  // namespace

void add_verify_command(CommandLine& line, VerifyCommandOptions& options, Terminal& terminal) {
  Command& command = line.add_command(
      "verify", "Checks the structure, that pieces cover their tensors, and all checksums",
      [&] { return run_verify(options, terminal); });
  command.describe(
      "Continues after a finding, so one run reports all of them. Notes name what the format does "
      "not protect, and values of classes, which the tool never reads. Only errors make the exit "
      "code 1.");
  command.argument("PATH", options.source.path, kPathHelp)
      .flag("--values", options.values, "Also report numbers that are NaN or infinite as errors")
      .option("--part", "I/N", options.part,
              "Check only part I of N (I from 0 to N-1). Other processes check the other parts, "
              "and --join joins them")
      .option("--join", "FILE", options.joined_paths,
              "Join the outputs of all parts, and read no elements. Repeatable")
      .flag("--json", options.json, "Print JSON");
  add_flat_layout_option(command, options.source);
  add_as_dict_option(command, options.source.as_dict);
  add_recipe_options(command, options.source.recipe);
  add_work_options(command, options.work);
  command.example("verify step-1000 --values", "Check a checkpoint before training resumes from it")
      .example("verify step-1000 --json --part 0/2 > part-0",
               "One of two processes that share the work")
      .example("verify step-1000 --join part-0 --join part-1",
               "Join the outputs of both: the result is what one process prints");
}

ExitCode run_verify(const VerifyCommandOptions& options, Terminal& terminal) {
  check_options(options);
  const auto* const reader = open_source(options.source);
  inspect::VerifyOptions verify_options;
  if (options.values) {
    verify_options.numbers = inspect::VerifyOptions::Numbers::must_be_finite;
  }
  if (!options.part.empty()) return run_part(options, verify_options, *reader, terminal);
  inspect::VerifyReport report;
  if (!options.joined_paths.empty()) {
    report = join(options, *reader, verify_options.numbers);
  } else {
    Work work(terminal, "verify", inspect::verify_nbytes(*reader, verify_options), options.work);
    verify_options.scan = work.scan_options();
    report = inspect::verify(*reader, verify_options);
  }
  require_sources_unchanged();
  if (options.json) {
    print_json(*reader, report, terminal);
  } else {
    print_text(*reader, report, terminal);
  }
  return report.has_errors() ? ExitCode::findings : ExitCode::done;
}

}  // namespace tessera::cli
