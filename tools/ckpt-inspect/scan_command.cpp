#include "ckpt-inspect/scan_command.h"

#include <algorithm>

#include "base/size_text.h"
#include "ckpt-inspect/source.h"
#include "cli/json_output.h"
#include "inspect/pickle_scan/pickle_scan.h"
#include "object_store/files.h"
#include "tessera/base/file_system.h"

namespace tessera::cli {
namespace {

using inspect::PickleScanReport;
using inspect::ScannedName;
using inspect::ScannedPlace;
using inspect::ScanProblem;
using inspect::Verdict;

constexpr Verdict kWorstFirst[] = {Verdict::dangerous, Verdict::opaque, Verdict::plain,
                                   Verdict::known};
constexpr std::size_t kMaxPlacesPrinted = 5;

Style style_of(Verdict verdict) {
  if (verdict == Verdict::dangerous) return Style::bad;
  return verdict == Verdict::opaque ? Style::notice : Style::plain;
}

std::string place_in_words(const std::string& path, const std::string& member,
                           std::optional<std::uint64_t> offset) {
  std::string words = printable(path, path.size() * 4);
  if (!member.empty()) words += ": " + printable(member, 200);
  if (offset) words += ": byte " + std::to_string(*offset);
  return words;
}

std::string name_in_words(const ScannedName& name) {
  return (name.is_called ? "calls " : "imports ") + printable(name.in_words(), 200);
}

void print_dangerous(const ScannedName& name, Terminal& terminal) {
  const std::string what = ": " + name_in_words(name) + " (" + name.reason + ")\n";
  const std::string title = terminal.styled(Style::bad, "dangerous: ");
  std::size_t num_printed = 0;
  for (const ScannedPlace& place : name.places) {
    if (num_printed++ == kMaxPlacesPrinted) break;
    terminal.print(title + place_in_words(place.path, place.member, place.offset) + what);
  }
  if (name.places.size() > kMaxPlacesPrinted) {
    terminal.print(title + printable(name.in_words(), 200) + " in more places; " +
                   counted(name.num_times, "time") + " in all\n");
  }
}

void print_opaque(const ScannedName& name, Terminal& terminal) {
  const ScannedPlace& place = name.places.front();
  terminal.print(terminal.styled(Style::notice, "opaque: ") +
                 place_in_words(place.path, place.member, place.offset) + ": " +
                 name_in_words(name) + ", " + counted(name.num_times, "time") + "\n");
}

/// Prints, on one line, all names that have `verdict`, which is no finding. Prints no empty line.
void print_harmless(const PickleScanReport& report, Verdict verdict, Terminal& terminal) {
  std::string line;
  for (const ScannedName& name : report.names) {
    if (name.verdict != verdict) continue;
    line += (line.empty() ? "" : ", ") + printable(name.in_words(), 200);
  }
  if (!line.empty()) terminal.print(std::string(to_string(verdict)) + ": " + line + "\n");
}

void print_problem(const ScanProblem& problem, Terminal& terminal) {
  terminal.print(terminal.styled(Style::bad, std::string(to_string(problem.kind)) + ": ") +
                 place_in_words(problem.path, problem.member, problem.offset) + ": expected " +
                 printable(problem.expected) + ", found " + printable(problem.found) + "\n");
}

std::string summary(const PickleScanReport& report, Terminal& terminal) {
  std::string counts;
  for (const Verdict verdict : kWorstFirst) {
    const std::size_t count = report.count(verdict);
    const std::string words = std::to_string(count) + " " + std::string(to_string(verdict));
    counts += (counts.empty() ? "" : ", ") +
              (count > 0 ? terminal.styled(style_of(verdict), words) : words);
  }
  if (!report.problems.empty()) {
    counts += "; " + terminal.styled(Style::bad, counted(report.problems.size(), "problem"));
  }
  return counts + "; " + counted(report.num_pickles, "pickle") + " in " +
         counted(report.num_files, "file") + "\n";
}

void print_text(const PickleScanReport& report, Terminal& terminal) {
  for (const ScannedName& name : report.names) {
    if (name.verdict == Verdict::dangerous) print_dangerous(name, terminal);
  }
  for (const ScanProblem& problem : report.problems) print_problem(problem, terminal);
  for (const ScannedName& name : report.names) {
    if (name.verdict == Verdict::opaque) print_opaque(name, terminal);
  }
  print_harmless(report, Verdict::plain, terminal);
  print_harmless(report, Verdict::known, terminal);
  terminal.print(summary(report, terminal));
}

void write_place(JsonOutput& json, const std::string& path, const std::string& member,
                 std::optional<std::uint64_t> offset) {
  json.member("file", path).member("member", member);
  if (offset) json.member("offset", *offset);
}

void print_json(const PickleScanReport& report, Terminal& terminal) {
  JsonOutput json(terminal, kInspectJsonSchema);
  json.member("clean", report.is_clean());
  json.member("files", report.num_files).member("pickles", report.num_pickles);
  json.key("names").begin_array();
  for (const ScannedName& name : report.names) {
    json.begin_object().member("verdict", to_string(name.verdict));
    json.member("module", name.module).member("name", name.name);
    if (!name.reason.empty()) json.member("reason", name.reason);
    json.member("called", name.is_called).member("times", name.num_times);
    json.key("places").begin_array();
    for (const ScannedPlace& place : name.places) {
      json.begin_object();
      write_place(json, place.path, place.member, place.offset);
      json.end_object();
    }
    json.end_array().end_object();
  }
  json.end_array();
  json.key("problems").begin_array();
  for (const ScanProblem& problem : report.problems) {
    json.begin_object().member("kind", to_string(problem.kind));
    write_place(json, problem.path, problem.member, problem.offset);
    json.member("expected", problem.expected).member("found", problem.found).end_object();
  }
  json.end_array();
  json.finish();
}

}  // namespace

void add_scan_command(CommandLine& line, ScanCommandOptions& options, Terminal& terminal) {
  Command& command = line.add_command(
      "scan", "Lists what pickles in files and folders would import and call in Python",
      [&] { return run_scan(options, terminal); });
  command.describe(
      "Use it on files that another program will load with pickle. Runs and imports nothing. Looks "
      "into files of any kind: zip archives (also damaged ones), tars, NumPy and compressed files. "
      "Each name gets a verdict. known: torch.load(weights_only=True) allows it. plain: a value of "
      "the standard library or NumPy. opaque: of another package, whose code the scan does not "
      "know. dangerous: can run code. The exit code is 1 if a name is dangerous, a pickle is "
      "broken, an archive contradicts itself, or something was not looked at.");
  command.argument("PATH", options.path, "A file, or a folder with all below it")
      .arguments("MORE...", options.more_paths, "More files and folders")
      .flag("--json", options.json, "Print JSON");
  command.example("scan download/", "Look at all files of a download before something loads them");
}

ExitCode run_scan(const ScanCommandOptions& options, Terminal& terminal) {
  std::vector<std::string> paths{options.path};
  paths.insert(paths.end(), options.more_paths.begin(), options.more_paths.end());
  if (std::ranges::find(paths, "-") != paths.end()) {
    throw UsageError(
        "PATH: expected a path, found '-' (scan reads no standard input; save it to a file)",
        "ckpt-inspect scan --help");
  }
  const PickleScanReport report = inspect::scan_pickles(object_store::files(), paths);
  if (options.json) {
    print_json(report, terminal);
  } else {
    print_text(report, terminal);
  }
  return report.is_clean() ? ExitCode::done : ExitCode::findings;
}

}  // namespace tessera::cli
