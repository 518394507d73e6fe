#include "ckpt-inspect/stats_command.h"

#include <array>
#include <cstdio>
#include <map>

#include "ckpt-inspect/json_members.h"
#include "ckpt-inspect/quantized.h"
#include "cli/table.h"
#include "tessera/base/size_text.h"

namespace tessera::cli {
namespace {

using inspect::Statistics;

struct Group {
  std::int64_t num_tensors = 0;
  std::int64_t num_codes = 0;  // of these tensors, those whose elements are codes
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
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), count == total ? "%.0f%%" : "%.1f%%", percent);
  return text.data();
}

void print_table(const std::map<std::string, Group>& groups, const Statistics& all,
                 Terminal& terminal) {
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
  for (const auto& [name, group] : groups) {
    add(printable(name, name.size() * 4), group.statistics, Style::plain);
  }
  if (groups.size() > 1) add("all", all, Style::strong);
  table.print(terminal);
}

void write_group(JsonOutput& json, const Group& group) {
  json.member("tensors", group.num_tensors);
  if (group.num_codes > 0) json.member("codes", group.num_codes);
  write_statistics(json, group.statistics);
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
      .flag("--json", options.json, "Print JSON, with exact numbers");
  add_flat_layout_option(command, options.source);
  add_as_dict_option(command, options.source.as_dict);
  add_recipe_options(command, options.source.recipe);
  add_work_options(command, options.work);
  command.example("stats step-1000 model", "Print a line for each tensor of the model")
      .example("stats step-1000 --depth 1",
               "Print one line for the model and one for the optimizer");
}

ExitCode run_stats(const StatsOptions& options, Terminal& terminal) {
  const auto* const reader = open_source(options.source, terminal);
  const inspect::Selection selection = select_names(*reader, options.source);
  std::vector<Statistics> statistics;
  {
    Work work(terminal, "stats", selection.totals.nbytes, options.work);
    statistics = inspect::compute_statistics(*reader, selection.tensors, work.scan_options());
  }
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
  if (!options.json) {
    print_table(groups, all.statistics, terminal);
    note.print(terminal);
    return ExitCode::done;
  }
  JsonOutput json(terminal, kInspectJsonSchema);
  write_source(json, reader->format().name(), reader->contents());
  json.key("stats").begin_array();
  for (const auto& [name, group] : groups) {
    json.begin_object().member("name", name);
    write_group(json, group);
    json.end_object();
  }
  json.end_array();
  json.key("all").begin_object();
  write_group(json, all);
  json.end_object();
  json.finish();
  return ExitCode::done;
}

}  // namespace tessera::cli
