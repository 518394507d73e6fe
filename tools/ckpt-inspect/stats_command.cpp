#include "ckpt-inspect/stats_command.h"

#include <array>
#include <cstdio>
#include <map>

#include "base/json.h"
#include "base/size_text.h"
#include "ckpt-inspect/json_members.h"
#include "ckpt-inspect/part_document.h"
#include "ckpt-inspect/quantized.h"
#include "cli/part_option.h"
#include "cli/table.h"
#include "inspect/selection_part.h"
#include "inspect/statistics_parts.h"

namespace tessera::cli {
namespace {

using inspect::Statistics;

constexpr const char* kHelpCommand = "ckpt-inspect stats --help";

struct Group {
  std::int64_t num_tensors = 0;
  std::int64_t num_codes = 0;  // how many of these tensors have codes as elements
  Statistics statistics;
};

std::string prefix_of(const std::string& fqn, int depth) {
  std::size_t end = 0;
  for (int level = 0; level < depth; ++level) {
    end = fqn.find('.', level == 0 ? 0 : end + 1);
    if (end == std::string::npos) return fqn;
  }
  return fqn.substr(0, end);
}

std::string three_digits(const std::optional<double>& number) {
  if (!number) return "-";
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.3g", *number);
  return text.data();
}

std::string in_few_digits(const std::optional<inspect::Number>& number) {
  if (!number) return "-";
  std::string exact = inspect::number_to_string(*number);
  return exact.size() <= 8 ? exact : three_digits(inspect::to_double(*number));
}

std::string share(std::int64_t count, std::int64_t total) {
  if (count == 0) return "0";
  const double percent = 100.0 * static_cast<double>(count) / static_cast<double>(total);
  if (percent < 0.1) return "<0.1%";
  if (count != total && percent > 99.9) return ">99.9%";
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), count == total ? "%.0f%%" : "%.1f%%", percent);
  return text.data();
}

// The lines of aliases, by name: `= emb.weight`.
using AliasLines = std::map<std::string, std::string>;

AliasLines alias_lines(const formats::CheckpointContents& contents,
                       const inspect::Selection& selection) {
  AliasLines lines;
  for (const std::size_t a : selection.aliases) {
    lines.emplace(contents.aliases[a].fqn, "= " + printable(contents.aliases[a].target));
  }
  return lines;
}

void print_table(const std::map<std::string, Group>& groups, const AliasLines& aliases,
                 const Statistics& all, Terminal& terminal) {
  using enum Table::Align;
  Table table({left, right, right, right, right, right, right, right});
  table.let_shrink(0);
  table.add_row({{"", Style::faint},
                 {"min", Style::faint},
                 {"max", Style::faint},
                 {"mean", Style::faint},
                 {"std", Style::faint},
                 {"zeros", Style::faint},
                 {"NaN", Style::faint},
                 {"Inf", Style::faint}});
  const auto add = [&](const std::string& name, const Statistics& s, Style style) {
    const std::int64_t num_inf = s.num_positive_inf + s.num_negative_inf;
    const auto alarm = [&](std::int64_t count) { return count > 0 ? Style::bad : style; };
    table.add_row({{name, style},
                   {in_few_digits(s.min), style},
                   {in_few_digits(s.max), style},
                   {three_digits(s.mean()), style},
                   {three_digits(s.standard_deviation()), style},
                   {share(s.num_zeros, s.numel), style},
                   {std::to_string(s.num_nan), alarm(s.num_nan)},
                   {std::to_string(num_inf), alarm(num_inf)}});
  };
  auto next_alias = aliases.begin();
  const auto add_aliases_before = [&](const std::string* name) {  // null: all that are left
    for (; next_alias != aliases.end() && (name == nullptr || next_alias->first < *name);
         ++next_alias) {
      table.add_row({{printable(next_alias->first, next_alias->first.size() * 4)},
                     {next_alias->second, Style::faint, Table::Cell::Extent::rest_of_line}});
    }
  };
  for (const auto& [name, group] : groups) {
    add_aliases_before(&name);
    add(printable(name, name.size() * 4), group.statistics, Style::plain);
  }
  add_aliases_before(nullptr);
  if (groups.size() > 1) add("all", all, Style::strong);
  table.print(terminal);
}

void write_group(JsonOutput& json, const Group& group) {
  json.member("tensors", group.num_tensors);
  if (group.num_codes > 0) json.member("codes", group.num_codes);
  write_statistics(json, group.statistics);
}

void print_json(const formats::CheckpointReader& reader, const inspect::Selection& selection,
                const std::map<std::string, Group>& groups, const Group& all, Terminal& terminal) {
  JsonOutput json(terminal, kInspectJsonSchema);
  write_source(json, reader.format().name(), reader.contents());
  json.key("stats").begin_array();
  for (const auto& [name, group] : groups) {
    json.begin_object().member("name", name);
    write_group(json, group);
    json.end_object();
  }
  json.end_array();
  write_aliases(json, reader.contents(), selection);
  json.key("all").begin_object();
  write_group(json, all);
  json.end_object();
  json.finish();
}

std::vector<Statistics> compute(const StatsOptions& options,
                                const formats::CheckpointReader& reader,
                                const inspect::Selection& selection, Terminal& terminal) {
  std::uint64_t nbytes = 0;
  for (const std::size_t t : selection.tensors) {
    nbytes += reader.contents().tensors[t].meta.nbytes();
  }
  Work work(terminal, "stats", nbytes, options.work);
  return inspect::compute_statistics(reader, selection.tensors, work.scan_options());
}

std::vector<Statistics> join(const StatsOptions& options, const formats::CheckpointReader& reader,
                             const inspect::Selection& selection) {
  std::vector<inspect::PartOfStatistics> parts;
  for (const std::string& path : options.joined_paths) {
    parts.push_back({path, read_part_document(path, "part of statistics", "stats")});
  }
  std::vector<Statistics> joined = inspect::join_statistics(parts, reader.contents(), selection);
  const PartFiles files = files_of_part(reader);
  for (const auto& [path, document] : parts) require_files(document, path, files);
  return joined;
}

// Prints the statistics of one part of the tensors as JSON, which --join reads.
void print_part(const StatsOptions& options, const formats::CheckpointReader& reader,
                const inspect::Selection& selection, Terminal& terminal) {
  const PartOfWork part = parse_part("--part", options.part, kHelpCommand);
  const inspect::Selection mine =
      inspect::part_of_selection(reader.contents(), selection, part.index, part.num_parts);
  const PartFiles files = files_of_part(reader);
  const std::vector<Statistics> statistics = compute(options, reader, mine, terminal);
  require_sources_unchanged();
  JsonOutput json(terminal, kInspectJsonSchema);
  write_source(json, reader.format().name(), reader.contents());
  json.member("part_of_stats", options.part).key("stats").begin_array();
  for (std::size_t i = 0; i < statistics.size(); ++i) {
    Value::Dict entry{{"name", reader.contents().tensors[mine.tensors[i]].meta.fqn}};
    for (auto& member : inspect::exact_statistics(statistics[i])) {
      entry.push_back(std::move(member));
    }
    json.raw(value_to_json(Value(std::move(entry))));
  }
  json.end_array();
  write_files_of_part(json, files);
  json.finish();
}

void check_options(const StatsOptions& options) {
  if (options.part.empty()) return;
  const auto refuse = [](const std::string& other) {
    throw UsageError("--part: expected either --part or " + other + ", found both", kHelpCommand);
  };
  if (!options.joined_paths.empty()) refuse("--join");
  if (options.depth > 0) refuse("--depth");
  require_json_of_part(options.json, kHelpCommand);
}

}  // namespace

void add_stats_command(CommandLine& line, StatsOptions& options, Terminal& terminal) {
  Command& command =
      line.add_command("stats", "Prints statistics of tensors: range, mean, zeros, NaN",
                       [&] { return run_stats(options, terminal); });
  command.describe(
      "Minimum, maximum, mean and standard deviation (torch.std, n-1) are over the finite numbers. "
      "A complex number counts by its magnitude.");
  add_source_arguments(command, options.source);
  command
      .option("--depth", "N", options.depth, "Group tensors by the first N levels of their names")
      .option("--part", "I/N", options.part,
              "Compute only part I of N (I from 0 to N-1). Other processes compute the other "
              "parts, and --join joins them")
      .option("--join", "FILE", options.joined_paths,
              "Join the outputs of all parts, and read no elements. Repeatable")
      .flag("--json", options.json, "Print JSON, with exact numbers");
  add_flat_layout_option(command, options.source);
  add_as_dict_option(command, options.source.as_dict);
  add_recipe_options(command, options.source.recipe);
  add_work_options(command, options.work);
  command.example("stats step-1000 model", "Print a line for each tensor of the model")
      .example("stats step-1000 --depth 1",
               "Print one line for the model and one for the optimizer")
      .example("stats step-1000 --json --part 0/2 > part-0",
               "One of two processes that share the work")
      .example("stats step-1000 --join part-0 --join part-1",
               "Join the outputs of both: the result is what one process prints");
}

ExitCode run_stats(const StatsOptions& options, Terminal& terminal) {
  check_options(options);
  const auto* const reader = open_source(options.source, terminal);
  const inspect::Selection selection = select_with_tensors_of_aliases(*reader, options.source);
  if (!options.part.empty()) {
    print_part(options, *reader, selection, terminal);
    return ExitCode::done;
  }
  const std::vector<Statistics> statistics = options.joined_paths.empty()
                                                 ? compute(options, *reader, selection, terminal)
                                                 : join(options, *reader, selection);
  require_sources_unchanged();
  const formats::QuantizedTensors quantized = quantized_tensors_of(*reader);
  CodesNote note;
  std::map<std::string, Group> groups;
  Group all;
  for (std::size_t i = 0; i < statistics.size(); ++i) {
    const std::string& fqn = reader->contents().tensors[selection.tensors[i]].meta.fqn;
    const bool are_codes = quantized.are_codes(selection.tensors[i]);
    Group& group = groups[options.depth > 0 ? prefix_of(fqn, options.depth) : fqn];
    for (Group* each : {&group, &all}) {
      ++each->num_tensors;
      each->num_codes += are_codes ? 1 : 0;
      each->statistics.merge(statistics[i]);
    }
    if (are_codes) {
      note.add(fqn, quantized.scheme_in_words(*quantized.find(selection.tensors[i])));
    }
  }
  if (options.json) {
    print_json(*reader, selection, groups, all, terminal);
  } else {
    const bool lists_tensors = options.depth <= 0;
    print_table(groups, lists_tensors ? alias_lines(reader->contents(), selection) : AliasLines(),
                all.statistics, terminal);
    note.print(terminal);
  }
  return ExitCode::done;
}

}  // namespace tessera::cli
