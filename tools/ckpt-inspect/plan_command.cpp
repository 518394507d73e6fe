#include "ckpt-inspect/plan_command.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "base/outside_failure.h"
#include "cli/output_file.h"
#include "reshard/checkpoint_tables.h"
#include "reshard/tied_tables.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"
#include "tessera/layout/table_planner.h"

namespace tessera::cli {
namespace {

constexpr std::uint64_t kMaxNotesNbytes = std::uint64_t{256} << 20;

PlannerOptions planner_options(const PlanCommandOptions& options, int checkpoint_world_size) {
  PlannerOptions planner;
  planner.world_size = options.world_size == PlanCommandOptions::kNotGiven ? checkpoint_world_size
                                                                           : options.world_size;
  planner.ranks_per_host = options.ranks_per_host;
  planner.memory_per_rank_nbytes = options.memory_per_rank_nbytes;
  planner.reserved_nbytes = options.reserved_nbytes;
  planner.batch_size = options.batch_size;
  planner.bandwidths = {.random_rows = static_cast<double>(options.random_row_bandwidth),
                        .within_host = static_cast<double>(options.host_bandwidth),
                        .between_hosts = static_cast<double>(options.network_bandwidth)};
  return planner;
}

std::vector<reshard::TableName> selected_tables(const formats::CheckpointReader& reader,
                                                const PlanCommandOptions& options) {
  select_names(reader, options.source);  // throws if a pattern selects nothing
  const NameSelection selection(options.source.patterns);
  std::vector<reshard::TableName> names = reshard::table_names(reader.contents());
  std::erase_if(names, [&](const auto& name) { return !selection.selects(name.fqn); });
  return names;
}

std::vector<TableSize> tables_to_plan(const formats::CheckpointReader& reader,
                                      const std::vector<reshard::TableName>& names,
                                      const PlanCommandOptions& options) {
  std::vector<TableSize> tables =
      reshard::checkpoint_tables(reader.contents(), names, reader.path());
  if (tables.empty()) {
    throw Error::expected(ErrorKind::mismatch, {.path = reader.path()}, "plan",
                          "a table, named `embedding_bags.NAME.weight` or `embeddings.NAME.weight`",
                          "none among the selected tensors");
  }
  for (TableSize& table : tables) table.pooling_factor = options.pooling_factor;
  return tables;
}

/// Prints two tables, each with a title line, and a summary line.
void print_explanation(const ProposedPlan& proposed, Terminal& terminal) {
  constexpr int kNumTables = 2;
  const auto max_width = static_cast<std::size_t>(std::max(terminal.width(), 0));
  const std::string text = proposed.to_text(terminal.output_is_terminal() ? max_width : 0);
  int section = 0;
  bool begins_section = true;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    const std::string_view line = std::string_view(text).substr(begin, end - begin);
    const Style of_first_line = section < kNumTables ? Style::faint : Style::strong;
    terminal.print(begins_section ? terminal.styled(of_first_line, line) : std::string(line));
    terminal.print("\n");
    begins_section = line.empty();
    if (begins_section) ++section;
    begin = end + 1;
  }
}

void note_tied_tables(const formats::CheckpointContents& contents,
                      const std::vector<reshard::TableName>& names, Terminal& terminal) {
  std::map<std::size_t, std::string> first_names;  // by tensor
  for (const reshard::TableName& name : names) {
    if (reshard::is_copy_of_rank(contents, name.fqn)) {
      terminal.print_error("note: " + printable(name.fqn) + ": a copy of table " +
                           printable(name.table) + " that one rank has; not counted in the plan");
      continue;
    }
    const std::string& first = first_names.emplace(name.tensor_index, name.table).first->second;
    if (first == name.table) continue;
    terminal.print_error("note: table " + printable(name.table) + " is tied to " +
                         printable(first) +
                         ": both are planned as one table, and have the same rule in the plan");
  }
}

// Protects a checkpoint named by mistake: replaces an existing file only if it is a plan or empty.
void require_plan_or_nothing(const FileSystem& fs, const std::string& path) {
  if (fs.kind_of(path) != FileKind::regular) return;
  try {
    const std::string text = read_file(fs, path, kMaxNotesNbytes);
    if (!text.empty()) TablePlan::from_json(text, path);
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    throw Error::expected(ErrorKind::invalid_argument, {.path = path}, "--overwrite",
                          "a file with a plan", "another kind of file", "it was not changed");
  }
}

}  // namespace

void add_plan_command(CommandLine& line, PlanCommandOptions& options, Terminal& terminal) {
  Command& command = line.add_command("plan", "Proposes how to shard embedding tables over ranks",
                                      [&] { return run_plan(options, terminal); });
  command.describe(
      "Prints memory and time of each table and each rank, and the reasons. Reads only names, "
      "shapes and dtypes. Trainers and ckpt-reshard --plan read the plan. Times are estimates from "
      "the given bandwidths; use them to compare plans.");
  add_source_arguments(command, options.source);
  command.option("--world-size", "N", options.world_size, "Number of ranks (default: as in PATH)")
      .option("--ranks-per-host", "N", options.ranks_per_host, "Ranks on each host (default: all)")
      .size_option("--memory-per-rank", "SIZE", options.memory_per_rank_nbytes,
                   "Total memory of each rank. Required")
      .size_option("--reserve", "SIZE", options.reserved_nbytes,
                   "Part of that memory that tables must not use (default: {})")
      .option("--batch-size", "N", options.batch_size, "Samples per rank and step (default: {})")
      .option("--pooling-factor", "X", options.pooling_factor,
              "Mean number of ids in a bag, for all tables (default: {})")
      .option("--notes", "FILE", options.notes_path,
              "JSON file: facts and constraints for single tables")
      .size_option("--row-bandwidth", "SIZE", options.random_row_bandwidth,
                   "Bytes of random rows that a rank reads or writes per second (default: {})")
      .size_option("--host-bandwidth", "SIZE", options.host_bandwidth,
                   "Bytes per second to ranks on the same host (default: {})")
      .size_option("--network-bandwidth", "SIZE", options.network_bandwidth,
                   "Bytes per second to ranks on other hosts (default: {})")
      .option("--output", "FILE", options.output_path, "Write the plan to FILE, as JSON")
      .flag("--overwrite", options.overwrite, "Replace FILE if it exists")
      .flag("--json", options.json, "Print the plan and the reasons as JSON");
  command
      .example("plan step-1000 --memory-per-rank 16GiB --output plan.json",
               "Plan for the ranks that wrote the checkpoint")
      .example("plan step-1000 --world-size 16 --ranks-per-host 8 --memory-per-rank 40GiB",
               "Plan for two hosts with eight ranks each");
}

ExitCode run_plan(const PlanCommandOptions& options, Terminal& terminal) {
  if (options.memory_per_rank_nbytes == 0) {
    throw UsageError("--memory-per-rank is missing", "ckpt-inspect plan --help");
  }
  std::optional<OutputFile> output;
  if (options.output_path == "-") {
    throw UsageError("--output needs a file; --json prints the plan", "ckpt-inspect plan --help");
  }
  if (!options.output_path.empty()) {
    if (options.overwrite) require_plan_or_nothing(FileSystem::posix(), options.output_path);
    output.emplace(FileSystem::posix(), options.output_path,
                   options.overwrite ? OverwritePolicy::replace : OverwritePolicy::refuse,
                   "--output");
  }
  const auto* const reader = open_source(options.source, terminal);
  const std::vector<reshard::TableName> names = selected_tables(*reader, options);
  std::vector<TableSize> tables = tables_to_plan(*reader, names, options);
  PlannerOptions planner = planner_options(options, std::max(1, reader->contents().world_size));
  if (!options.notes_path.empty()) {
    read_table_notes(read_file(FileSystem::posix(), options.notes_path, kMaxNotesNbytes),
                     options.notes_path, tables, planner);
  }
  ProposedPlan proposed = propose_plan(tables, planner);
  reshard::add_rules_for_tied_tables(names, proposed.plan);
  note_tied_tables(reader->contents(), names, terminal);
  require_sources_unchanged();
  if (output) {
    output->write(proposed.plan.to_json());
    output->commit();
  }
  if (options.json) {
    terminal.print(proposed.to_json());
  } else {
    print_explanation(proposed, terminal);
  }
  return ExitCode::done;
}

}  // namespace tessera::cli
