#include "ckpt-reshard/move.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <span>
#include <utility>

#include "base/float_text.h"
#include "cli/command_line_remedies.h"
#include "cli/format_rows.h"
#include "cli/json_output.h"
#include "cli/stop_signals.h"
#include "cli/table.h"
#include "formats/staging/staged_destination.h"
#include "tessera/base/file_system.h"
#include "tessera/base/size_text.h"
#include "tessera/formats/create.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"
#include "tessera/formats/native.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/journaled_options.h"

namespace tessera::cli {
namespace {

using formats::CheckpointReader;
using formats::Finding;
using formats::FormatTraits;
using formats::NativeWriteOptions;
using reshard::Plan;
using reshard::PlanOptions;

constexpr std::uint64_t kMaxOptionFileNbytes = std::uint64_t{256} << 20;
constexpr int kJsonSchema = 1;
constexpr std::size_t kMaxFindingsShown = 100;
constexpr std::size_t kMaxUnderflowsShown = 10;  // they are common, and harmless to most models

[[noreturn]] void refuse_option(const std::string& option, const std::string& expected,
                                const std::string& found) {
  throw UsageError(option + ": expected " + expected + ", found '" + printable(found) + "'",
                   "ckpt-reshard --help");
}

std::string read_option_file(const std::string& path) {
  return path.empty() ? path : read_file(FileSystem::posix(), path, kMaxOptionFileNbytes);
}

NativeWriteOptions compression(const MoveOptions& options) {
  const auto parsed = formats::parse_compression(options.compress);
  if (!parsed) refuse_option("--compress", std::string(formats::kCompressions), options.compress);
  return *parsed;
}

std::vector<reshard::Rename> parse_renames(const std::vector<std::string>& texts) {
  std::vector<reshard::Rename> renames;
  for (const std::string& text : texts) {
    const std::optional<reshard::Rename> rename = parse_rename(text);
    if (!rename) refuse_option("--rename", "FROM=TO", text);
    renames.push_back(*rename);
  }
  return renames;
}

/// Returns 0 if the option is not given.
int count_option(const std::string& name, int number) {
  if (number == MoveOptions::kNotGiven) return 0;
  if (number < 1) refuse_option(name, "a number of 1 or more", std::to_string(number));
  return number;
}

/// Refuses options that contradict each other, or that the destination's format does not support.
void check_options(const MoveOptions& options) {
  if (options.resume && options.discard)
    refuse_option("--resume", "either --resume or --discard", "both");
  if (!options.extra_files_folder.empty() &&
      options.extra_files != reshard::ExtraFilesPolicy::carry) {
    const bool leaves = options.extra_files == reshard::ExtraFilesPolicy::leave;
    refuse_option("--extra-files-from", "--extra-files carry", leaves ? "leave" : "refuse");
  }
  const std::string found = "--to " + std::string(options.format->name());
  const FormatTraits traits = formats::traits_of(*options.format);
  if (compression(options).compression != NativeWriteOptions::Compression::none &&
      !traits.has_compression) {
    refuse_option("--compress",
                  "--to " + formats::writable_formats_in_words(
                                [](const FormatTraits& of) { return of.has_compression; }),
                  found);
  }
  if (options.max_shard_nbytes != 0 && !traits.has_several_files) {
    refuse_option("--max-shard-size",
                  "--to " + formats::writable_formats_in_words(
                                [](const FormatTraits& of) { return of.has_several_files; }),
                  found);
  }
}

/// The contents of the files that options name; empty for options that are not given.
struct OptionFiles {
  explicit OptionFiles(const MoveOptions& options)
      : table_plan(read_option_file(options.table_plan_path)),
        units(read_option_file(options.units_path)),
        flat_layout(read_option_file(options.flat_layout_path)) {}

  std::string table_plan;
  std::string units;
  std::string flat_layout;
};

PlanOptions plan_options(const MoveOptions& options, const OptionFiles& files) {
  PlanOptions plan;
  plan.format = *options.format;
  plan.world_size = count_option("--world-size", options.world_size);
  plan.strategy = options.strategy;
  plan.only = NameSelection(options.only);
  if (options.drop_optimizer) plan.optimizer = reshard::OptimizerSelection::leave_out;
  plan.optimizer_names = options.optimizer_names;
  plan.renames = parse_renames(options.renames);
  plan.renames.insert(plan.renames.end(), options.prefix_removals.begin(),
                      options.prefix_removals.end());
  if (!options.cast.empty()) {
    plan.cast = parse_dtype(options.cast);
    if (!plan.cast) refuse_option("--cast", dtype_expectation(options.cast), options.cast);
  }
  plan.on_overflow = options.on_overflow;
  if (options.allow_missing) plan.missing = reshard::Relaxation::allow;
  if (options.allow_lossy) plan.lossy = reshard::Relaxation::allow;
  if (options.as_is) plan.part = reshard::Relaxation::allow;
  if (!options.table_plan_path.empty()) {
    plan.table_plan = TablePlan::from_json(files.table_plan, options.table_plan_path);
  }
  if (!options.units_path.empty()) {
    plan.units = flat_units_from_json(files.units, options.units_path);
  }
  return plan;
}

OverwritePolicy overwrite_policy(const MoveOptions& options) {
  return options.overwrite ? OverwritePolicy::replace : OverwritePolicy::refuse;
}

formats::CreateOptions create_options(const MoveOptions& options, const OptionFiles& files,
                                      const PlanOptions& plan) {
  formats::CreateOptions create;
  create.format = *options.format;
  create.overwrite = overwrite_policy(options);
  create.native = compression(options);
  create.journal.emplace();
  create.journal->identity =
      reshard::identity_of_options({.world_size = plan.world_size,
                                    .strategy = plan.strategy,
                                    .table_plan = files.table_plan,
                                    .units = files.units,
                                    .flat_layout = files.flat_layout,
                                    .as_dict = options.as_dict,
                                    .only = options.only,
                                    .renames = parse_renames(options.renames),
                                    .prefix_removals = options.prefix_removals,
                                    .source_prefixes = options.source_prefixes,
                                    .preference = options.preference,
                                    .cast = plan.cast,
                                    .on_overflow = options.on_overflow,
                                    .optimizer_names = options.optimizer_names,
                                    .drop_optimizer = options.drop_optimizer,
                                    .allow_missing = options.allow_missing,
                                    .allow_lossy = options.allow_lossy,
                                    .as_is = options.as_is});
  create.journal->identity["tool"] = "ckpt-reshard " TESSERA_VERSION;
  if (options.resume) create.journal->kept_work = formats::KeptWork::resume;
  if (options.discard) create.journal->kept_work = formats::KeptWork::discard;
  if (options.max_shard_nbytes != 0) create.safetensors.max_shard_nbytes = options.max_shard_nbytes;
  return create;
}

std::string contents_line(const MoveOptions& options, const Plan& plan) {
  const formats::CheckpointContents& contents = plan.destination;
  std::string line = counted(contents.tensors.size(), "tensor");
  if (!contents.values.empty()) line += ", " + counted(contents.values.size(), "value");
  if (!contents.aliases.empty())
    line += ", " + counted(contents.aliases.size(), "alias", "aliases");
  line += ", " + exact_size(plan.nbytes_to_write) + ", " + std::string(options.format->name());
  if (!formats::holds_whole_tensors(*options.format)) {
    line += " for " + counted(static_cast<std::uint64_t>(contents.world_size), "rank");
  }
  return line;
}

/// What a run does, and has done.
struct Outcome {
  Plan plan;
  reshard::ExtraFilesPlan extra_files;
  std::uint64_t kept_nbytes = 0;  // that an interrupted run had written
  std::vector<reshard::TensorOverflow> overflows{};
  std::vector<reshard::TensorUnderflow> underflows{};
  reshard::FileStates source_files{};  // when the source was opened
};

void write_overflows(JsonOutput& json, const Plan& plan,
                     const std::vector<reshard::TensorOverflow>& overflows) {
  json.key("overflows").begin_array();
  for (const reshard::TensorOverflow& overflow : overflows) {
    json.begin_object();
    json.member("name", plan.destination.tensors[overflow.tensor_index].meta.fqn);
    json.member("elements", overflow.num_elements);
    json.member("largest", overflow.largest_magnitude);
    json.end_object();
  }
  json.end_array();
}

void write_underflows(JsonOutput& json, const Plan& plan,
                      const std::vector<reshard::TensorUnderflow>& underflows) {
  json.key("underflows").begin_array();
  for (const reshard::TensorUnderflow& underflow : underflows) {
    json.begin_object();
    json.member("name", plan.destination.tensors[underflow.tensor_index].meta.fqn);
    json.member("elements", underflow.num_elements).end_object();
  }
  json.end_array();
}

void write_changes(JsonOutput& json, const std::vector<reshard::FormatChangeCount>& changes) {
  json.key("changes").begin_array();
  for (const auto& [change, count, names] : changes) {
    json.begin_object().member("kind", format_change_name(change));
    json.member("count", std::uint64_t{count});
    if (!names.empty()) {
      json.key("names").begin_array();
      for (const std::string& name : names) json.value(name);
      json.end_array();
    }
    json.end_object();
  }
  json.end_array();
}

void write_extra_files(const reshard::ExtraFilesPlan& files, JsonOutput& json) {
  json.key("extra_files").begin_array();
  for (const formats::ExtraFile& file : files.carried) {
    json.begin_object().member("name", file.name).member("nbytes", file.nbytes);
    for (const auto& edit : files.edits) {
      if (edit.name == file.name) json.member("edit", edit.what);
    }
    json.end_object();
  }
  json.end_array();
  json.key("left_files").begin_array();
  for (const auto& left : files.left) {
    json.begin_object().member("name", left.name).member("why", left.why).end_object();
  }
  json.end_array();
}

void print_json(const MoveOptions& options, const Outcome& outcome, const CheckpointReader& reader,
                Terminal& terminal) {
  const Plan& plan = outcome.plan;
  JsonOutput json(terminal, kJsonSchema);
  json.member("source_format", reader.format().name());
  json.member("format", options.format->name());
  json.member("world_size", plan.destination.world_size);
  json.member("num_tensors", std::uint64_t{plan.destination.tensors.size()});
  json.member("num_values", std::uint64_t{plan.destination.values.size()});
  json.member("num_aliases", std::uint64_t{plan.destination.aliases.size()});
  json.member("nbytes", plan.nbytes_to_write);
  json.member("kept_nbytes", outcome.kept_nbytes);
  json.member("plan", plan_digest(plan, reader.contents()));
  json.member("written", !options.dry_run && plan.problems.empty());
  json.key("ranks").begin_array();
  int rank = 0;
  for (const reshard::RankShare& share : reshard::rank_shares(plan)) {
    json.begin_object();
    json.member("rank", rank++).member("pieces", share.num_pieces).member("nbytes", share.nbytes);
    json.end_object();
  }
  json.end_array();
  write_overflows(json, plan, outcome.overflows);
  write_underflows(json, plan, outcome.underflows);
  write_changes(json, plan.changes);
  json.key("left_out").begin_object();
  json.member("tensors", std::uint64_t{plan.left_out.tensors});
  json.member("values", std::uint64_t{plan.left_out.values});
  json.member("aliases", std::uint64_t{plan.left_out.aliases}).end_object();
  for (const auto& [name, findings] :
       {std::pair{"problems", &plan.problems}, {"notes", &plan.notes}}) {
    json.key(name).begin_array();
    for (const Finding& finding : *findings) {
      json.begin_object();
      json.member("rule", finding.rule).member("name", finding.where.fqn);
      json.member("expected", finding.expected).member("found", finding.found);
      if (finding.remedy) json.member("remedy", command_line_remedy(finding.remedy));
      json.end_object();
    }
    json.end_array();
  }
  write_extra_files(outcome.extra_files, json);
  json.finish();
}

/// Returns the first names, and how many others there are.
std::string names_in_words(const std::vector<std::string>& names) {
  constexpr std::size_t kMaxNamed = 4;
  const std::size_t num_named = names.size() > kMaxNamed ? kMaxNamed - 1 : names.size();
  std::string text;
  for (std::size_t i = 0; i < num_named; ++i) text += (i > 0 ? ", " : "") + printable(names[i]);
  if (num_named < names.size())
    text += " and " + std::to_string(names.size() - num_named) + " more";
  return text;
}

/// Prints one line about the extra files that are carried, one for each edit, and one about what is
/// left.
void print_extra_files(const reshard::ExtraFilesPlan& files, Terminal& terminal) {
  std::vector<std::string> carried;
  std::uint64_t nbytes = 0;
  for (const formats::ExtraFile& file : files.carried) {
    carried.push_back(file.name);
    nbytes += file.nbytes;
  }
  if (!carried.empty()) {
    terminal.print(counted(carried.size(), "extra file") + ", " + exact_size(nbytes) + ": " +
                   names_in_words(carried) + "\n");
  }
  for (const auto& edit : files.edits) terminal.print(edit.name + ": " + edit.what + "\n");
  std::map<std::string, std::vector<std::string>> left;  // by reason
  for (const auto& [name, why] : files.left) left[why].push_back(name);
  std::string line;
  for (const auto& [why, names] : left) {
    line += (line.empty() ? "" : "; ") + names_in_words(names) + " (" + why + ")";
  }
  if (!line.empty()) {
    terminal.print("left " + std::to_string(files.left.size()) + " beside the checkpoint: " + line +
                   "\n");
  }
}

/// Returns ` (a, b)`.
std::string in_brackets(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? " (" : ", ") + printable(name);
  return text.empty() ? text : text + ")";
}

std::string change_in_words(const reshard::FormatChangeCount& counted_change) {
  using Change = reshard::FormatChange;
  const std::size_t count = counted_change.count;
  const auto words = [&](const char* one, const char* many) {
    return std::to_string(count) + " " + (count == 1 ? one : many);
  };
  switch (counted_change.change) {
    case Change::text_keys:
      return words("key of a dict becomes text", "keys of dicts become text");
    case Change::optimizer_keys:
      return words("number of an optimizer's state becomes text",
                   "numbers of optimizer state become text");
    case Change::split_ties:
      return words("tied tensor is stored twice", "tied tensors are stored twice");
    case Change::list_root:
      return "the outermost list becomes a dict";
    case Change::annotations:
      return words("text beside the tensors is left out", "texts beside the tensors are left out");
    case Change::requires_grad:
      return words("tensor loses requires_grad", "tensors lose requires_grad");
    case Change::parameters:
      return words("Parameter becomes a tensor", "Parameters become tensors");
    case Change::shared_memory:
      return words("tensor no longer shares memory with another",
                   "tensors no longer share memory with others");
    case Change::dict_classes:
      return words("OrderedDict or the like becomes a dict",
                   "OrderedDicts or the like become dicts");
    case Change::tuples:
      return words("tuple with a tensor becomes a list", "tuples with tensors become lists");
    case Change::attributes:
      return words("tensor or dict loses its attributes",
                   "tensors or dicts lose their attributes") +
             in_brackets(counted_change.names);
    case Change::value_types:
      return words("value becomes one of a plainer type", "values become ones of plainer types") +
             in_brackets(counted_change.names);
  }
  return {};
}

/// Prints one line about what the formats change.
void print_changes(const std::vector<reshard::FormatChangeCount>& changes, Terminal& terminal) {
  std::string line;
  for (const auto& change : changes) line += (line.empty() ? "" : "; ") + change_in_words(change);
  if (line.empty()) return;
  terminal.print("changed: " + line + " (docs/formats/what-each-holds.md)\n");
}

/// Prints one line about what the options leave out.
void print_left_out(const MoveOptions& options, const reshard::LeftOut& left, Terminal& terminal) {
  std::string what;
  const auto add = [&](std::size_t count, std::string_view one, std::string_view many) {
    if (count > 0) what += (what.empty() ? "" : ", ") + counted(count, one, many);
  };
  add(left.tensors, "tensor", "tensors");
  add(left.values, "value", "values");
  add(left.aliases, "alias", "aliases");
  if (what.empty()) return;
  std::string by = options.only.empty() ? "" : options.only_option;
  if (options.drop_optimizer) by += std::string(by.empty() ? "" : " and ") + "--drop-optimizer";
  terminal.print("left out by " + by + ": " + what + "\n");
}

/// Warns if an optimizer that is loaded from DCP would not find its state.
void warn_of_optimizer_keys(const std::vector<reshard::FormatChangeCount>& changes,
                            Terminal& terminal) {
  for (const auto& change : changes) {
    if (change.change != reshard::FormatChange::optimizer_keys) continue;
    terminal.print_error(
        "warning: " + change_in_words(change) +
        "; an optimizer of PyTorch does not find its state under text (--to native, "
        "safetensors or torch keeps numbers)");
  }
}

/// Prints what the reader found in the source when it opened it; notes have said it before.
void print_opening_findings(const CheckpointReader& reader, Terminal& terminal) {
  for (const Finding& finding : reader.contents().opening_findings) {
    terminal.print("source: " + finding_line(finding) + "\n");
  }
}

void print_plan(const MoveOptions& options, const Plan& plan, Terminal& terminal) {
  Table table({Table::Align::right, Table::Align::right, Table::Align::right});
  table.add_row({{"rank", Style::faint}, {"pieces", Style::faint}, {"bytes", Style::faint}});
  int rank = 0;
  for (const reshard::RankShare& share : reshard::rank_shares(plan)) {
    table.add_row({{std::to_string(rank++)},
                   {std::to_string(share.num_pieces)},
                   {std::to_string(share.nbytes)}});
  }
  table.print(terminal);
  const bool is_compressed =
      compression(options).compression != NativeWriteOptions::Compression::none;
  terminal.print("would write " + contents_line(options, plan) +
                 (is_compressed ? ", before compression" : "") + "\n");
}

/// Moves all bytes and commits. Adds to the outcome what it found.
void move(const MoveOptions& options, const formats::CreateOptions& create, Outcome& outcome,
          const CheckpointReader& reader, Terminal& terminal, const std::stop_token& stop) {
  const Plan& plan = outcome.plan;
  const auto writer =
      reshard::start_move(plan, reader, FileSystem::posix(), options.destination, create);
  if (options.resume && !writer->is_resumed() && !options.quiet) {
    terminal.print_error(
        "note: " + printable(formats::StagedDestination::staging_path_of(options.destination)) +
        ": no interrupted run to resume; started from the beginning");
  }
  Progress progress(terminal, options.progress, options.progress.verb, plan.nbytes_to_write);
  outcome.kept_nbytes = reshard::finish_or_keep(
      plan, reader, *writer, FileSystem::posix(), options.destination,
      {.memory_nbytes = options.memory_nbytes,
       .num_threads = count_option("--threads", options.num_threads),
       .stop = stop,
       .progress = [&](std::uint64_t nbytes) { progress.add(nbytes); },
       .resumed = [&](std::uint64_t nbytes) { progress.add_kept(nbytes); },
       .source_files = outcome.source_files,
       .overflowed = [&](const auto& overflow) { outcome.overflows.push_back(overflow); },
       .underflowed = [&](const auto& each) { outcome.underflows.push_back(each); }});
}

void print_num_left(std::size_t num_tensors, Terminal& terminal) {
  if (num_tensors == 0) return;
  terminal.print("  and " + counted(num_tensors, "more tensor") + " (--json lists all)\n");
}

/// Prints the tensors with numbers that were too large for the cast, at most kMaxFindingsShown.
void print_overflows(const Plan& plan, const std::vector<reshard::TensorOverflow>& overflows,
                     Terminal& terminal) {
  const std::size_t num_shown = std::min(overflows.size(), kMaxFindingsShown);
  for (const reshard::TensorOverflow& overflow : std::span(overflows).first(num_shown)) {
    const TensorMeta& meta = plan.destination.tensors[overflow.tensor_index].meta;
    const std::string became = plan.on_overflow == reshard::OnOverflow::saturate ? "saturated"
                               : meta.dtype == DType::float8_e4m3fn              ? "became NaN"
                                                                    : "became infinite";
    terminal.print("  " + printable(meta.fqn) + ": " +
                   counted(static_cast<std::uint64_t>(overflow.num_elements), "element") + " " +
                   became + ", the largest was " +
                   tessera::detail::float_to_text(overflow.largest_magnitude) + "\n");
  }
  print_num_left(overflows.size() - num_shown, terminal);
}

/// Prints the first tensors with numbers that the cast made zero.
void print_underflows(const Plan& plan, const std::vector<reshard::TensorUnderflow>& underflows,
                      Terminal& terminal) {
  const std::size_t num_shown = std::min(underflows.size(), kMaxUnderflowsShown);
  for (const reshard::TensorUnderflow& underflow : std::span(underflows).first(num_shown)) {
    const TensorMeta& meta = plan.destination.tensors[underflow.tensor_index].meta;
    terminal.print("  " + printable(meta.fqn) + ": " + std::to_string(underflow.num_elements) +
                   " of " + counted(static_cast<std::uint64_t>(meta.numel()), "element") +
                   " became zero\n");
  }
  print_num_left(underflows.size() - num_shown, terminal);
}

/// Prints findings, one on each line, at most kMaxFindingsShown.
void print_findings(const std::string& prefix, const std::vector<Finding>& findings,
                    Terminal& terminal) {
  const std::size_t num_shown = std::min(findings.size(), kMaxFindingsShown);
  for (std::size_t i = 0; i < num_shown; ++i) {
    terminal.print_error(prefix + finding_line(findings[i]));
  }
  if (num_shown == findings.size()) return;
  terminal.print_error(prefix + "and " + std::to_string(findings.size() - num_shown) +
                       " more (--json lists all)");
}

/// Refuses `-`, by which the user means standard input, as with ckpt-inspect. A file with that name
/// is `./-`.
void refuse_standard_input(const std::string& path) {
  if (path != "-") return;
  throw UsageError(
      "SRC: expected a path, found '-' (only ckpt-inspect reads standard input; save it to a file)",
      "ckpt-reshard --help");
}

void warn_of_left_over(const FileSystem& fs, const std::string& destination, Terminal& terminal) {
  const auto left_over = formats::left_over_at(fs, destination);
  if (!left_over) return;
  terminal.print_error("warning: " + printable(*left_over) +
                       ": could not remove the old checkpoint (remove it yourself)");
}

/// Adds the options that say how a move runs; what it writes does not depend on them.
void add_run_options(Command& command, MoveOptions& options) {
  command
      .size_option("--memory", "SIZE", options.memory_nbytes,
                   "Memory for all buffers (default: {})")
      .option("--threads", "N", options.num_threads, "Number of threads (default: number of cores)")
      .flag("--dry-run", options.dry_run, "Print how many bytes each rank would get; write nothing")
      .flag("--overwrite", options.overwrite, "Replace DST once the new checkpoint is complete")
      .flag("--resume", options.resume, "Resume the work of an interrupted run, if there is any")
      .flag("--discard", options.discard,
            "Remove the work of an interrupted run, and start from the beginning")
      .flag("--quiet", options.quiet, "Print only errors")
      .flag("--json", options.json, "Print the summary as JSON");
  add_progress_option(command, options.progress);
}

}  // namespace

void add_flat_layout_option(Command& command, MoveOptions& options) {
  command.option("--flat-layout", "FILE", options.flat_layout_path,
                 "JSON file: the parameters in the flat vectors of SRC (FSDP1 LOCAL_STATE_DICT)");
}

void add_move_options(Command& command, MoveOptions& options) {
  command
      .choice(
          "--to", formats::writable_format_names(),
          [&](const std::string& name) { options.format = *formats::parse_format(name); },
          "Format of DST (default: " + default_format_rule() + ")")
      .option("--world-size", "N", options.world_size, "Number of ranks to write for")
      .option("--strategy", "NAME", options.strategy,
              "How tensors are cut: replicated, flat (FSDP1), dim0 (FSDP2), hybrid:AxB or "
              "hybrid-flat:AxB (A replicas of B ranks)")
      .option("--plan", "FILE", options.table_plan_path,
              "JSON file: the plan of the embedding tables, as ckpt-inspect plan writes it")
      .option("--units", "FILE", options.units_path,
              "JSON file: the units for --strategy flat, if SRC records none")
      .option("--as-dict", "CLASS", options.as_dict,
              "Read objects of this class, such as argparse.Namespace, as dicts. Repeatable")
      .option("--compress", "HOW", options.compress,
              "Compression: none, zstd or zstd:LEVEL (default: {}). Native format only")
      .option("--only", "GLOB", options.only,
              "Move only names that match, and all below them (=GLOB: nothing below); !GLOB leaves "
              "names out. Repeatable")
      .option("--rename", "FROM=TO", options.renames,
              "Replace FROM at the start of names by TO; =TO puts TO before every name. Repeatable")
      .flag("--drop-optimizer", options.drop_optimizer,
            "Leave out optimizer state and param_groups")
      .choice(
          "--optimizer-names", {"as-stored", "canonical", "torchrec"},
          [&](const std::string& name) {
            options.optimizer_names = *reshard::parse_optimizer_names(name);
          },
          "Names and shapes for the fused optimizer state of embedding tables (default: as-stored)")
      .option("--cast", "DTYPE", options.cast,
              "Convert floating-point tensors, except scalar optimizer state")
      .choice(
          "--on-overflow", {"refuse", "saturate", "infinity"},
          [&](const std::string& name) { options.on_overflow = *reshard::parse_on_overflow(name); },
          "What --cast does with numbers that are too large for DTYPE: fail, take its largest "
          "number, or make them infinite (default: refuse)")
      .size_option("--max-shard-size", "SIZE", options.max_shard_nbytes,
                   "Most bytes in one file, such as 5GB. Safetensors format only")
      .flag("--allow-missing", options.allow_missing,
            "Leave out what is incomplete or missing in SRC")
      .flag("--allow-lossy", options.allow_lossy,
            "Allow merging row-wise state of several column shards by a weighted mean")
      .flag("--as-is", options.as_is,
            "Move one part of a checkpoint, such as the file of one rank, as if it were whole")
      .choice(
          "--extra-files", {"carry", "leave", "refuse"},
          [&](const std::string& policy) {
            options.extra_files = *reshard::parse_extra_files_policy(policy);
          },
          "What to do with other files in the folder of SRC, such as config.json: copy them into "
          "DST (default), leave them, or stop")
      .option("--extra-files-from", "DIR", options.extra_files_folder,
              "Copy the other files of DIR instead of those of SRC")
      .size_option("--extra-files-limit", "SIZE", options.extra_files_nbytes,
                   "Most bytes of such files together; the largest are left (default: {})");
  add_run_options(command, options);
}

namespace {

/// Refuses paths that cannot be read, or that DST must not replace. A directory that is replaced
/// may hold the `extra_files` of the new checkpoint; as long as those are not known, it is not
/// checked.
void check_paths(const MoveOptions& options, const std::vector<std::string>& paths,
                 const std::vector<formats::ExtraFile>* extra_files) {
  const FileSystem& fs = FileSystem::posix();
  const bool may_hold_extra_files =
      options.overwrite && fs.kind_of(options.destination) == FileKind::directory;
  for (const std::string& path : paths) {
    refuse_standard_input(path);
    if (extra_files == nullptr && may_hold_extra_files) continue;
    formats::check_destination(fs, path, options.destination, overwrite_policy(options),
                               "--overwrite",
                               extra_files ? *extra_files : std::vector<formats::ExtraFile>());
  }
}

Outcome plan_move(const MoveOptions& options, const PlanOptions& wanted,
                  const std::vector<std::string>& paths, const MoveSource& source) {
  const CheckpointReader& reader = *source.reader;
  Outcome outcome{reshard::plan_reshard(reader.contents(), reader.path(), wanted,
                                        reshard::find_gaps(reader, wanted.only)),
                  {}};
  outcome.extra_files = reshard::plan_extra_files(FileSystem::posix(), outcome.plan, reader, paths,
                                                  options.destination, *options.format,
                                                  {.policy = options.extra_files,
                                                   .max_nbytes = options.extra_files_nbytes,
                                                   .folder = options.extra_files_folder,
                                                   .preference = options.preference});
  auto& problems = outcome.plan.problems;
  problems.insert(problems.begin(), source.problems.begin(), source.problems.end());
  const auto& refused = outcome.extra_files.problems;
  problems.insert(problems.end(), refused.begin(), refused.end());
  const auto& told = outcome.extra_files.notes;
  outcome.plan.notes.insert(outcome.plan.notes.end(), told.begin(), told.end());
  return outcome;
}

void print_summary(const MoveOptions& options, const Outcome& outcome,
                   std::chrono::steady_clock::time_point start, Terminal& terminal) {
  const Plan& plan = outcome.plan;
  std::string line = options.destination + ": " + contents_line(options, plan);
  if (outcome.kept_nbytes > 0) {
    line += ", " + exact_size(outcome.kept_nbytes) + " of them from the interrupted run";
  }
  if (terminal.output_is_terminal()) {
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    const auto rate = static_cast<double>(plan.nbytes_to_write) / std::max(seconds.count(), 1e-3);
    line += ", " + iec_size(static_cast<std::uint64_t>(rate)) + "/s";
  }
  terminal.print(line + "\n");
  print_overflows(plan, outcome.overflows, terminal);
  print_underflows(plan, outcome.underflows, terminal);
}

/// Prints what a run has done, or would do.
void print_outcome(const MoveOptions& options, const Outcome& outcome,
                   const CheckpointReader& reader, std::chrono::steady_clock::time_point start,
                   Terminal& terminal) {
  if (options.json) return print_json(options, outcome, reader, terminal);
  if (options.dry_run) {
    print_plan(options, outcome.plan, terminal);
  } else if (options.quiet) {
    return;
  } else {
    print_summary(options, outcome, start, terminal);
  }
  print_left_out(options, outcome.plan.left_out, terminal);
  print_changes(outcome.plan.changes, terminal);
  print_opening_findings(reader, terminal);
  print_extra_files(outcome.extra_files, terminal);
}

/// Prints what a move has done. The destination is there and complete, so a standard output that
/// cannot be written makes the move no failure.
void print_complete(const MoveOptions& options, const Outcome& outcome,
                    const CheckpointReader& reader, std::chrono::steady_clock::time_point start,
                    Terminal& terminal) {
  const auto warn = [&](std::string_view why) {
    terminal.print_error("warning: " + printable(options.destination) + " is complete, but " +
                         std::string(why));
  };
  try {
    print_outcome(options, outcome, reader, start, terminal);
    terminal.flush();
  } catch (const OutputClosed&) {
    warn("the summary was not printed: standard output was closed");
  } catch (const Error& error) {
    warn("the summary was not printed: " + std::string(error.what()));
  }
}

}  // namespace

ExitCode run_move(MoveOptions options, const std::vector<std::string>& paths,
                  const std::function<MoveSource()>& open, Terminal& terminal) {
  if (!options.format) options.format = formats::format_for_destination(options.destination);
  check_options(options);
  if (options.quiet && options.progress.display == ProgressDisplay::automatic) {
    options.progress.display = ProgressDisplay::none;
  }
  FileSystem& fs = FileSystem::posix();
  check_paths(options, paths, nullptr);
  const OptionFiles files(options);
  PlanOptions wanted = plan_options(options, files);
  if (paths.size() == 1) {
    wanted.quantization_method = formats::read_quantization_method(fs, paths.front());
  }
  StopSignals signals;
  const MoveSource source = open();
  const CheckpointReader& reader = *source.reader;
  reshard::FileStates source_files = reshard::source_file_states(reader);
  formats::require_classes_found(options.as_dict, {&reader.contents()}, "--as-dict");
  Outcome outcome = plan_move(options, wanted, paths, source);
  outcome.source_files = std::move(source_files);
  const Plan& plan = outcome.plan;
  check_paths(options, paths, &outcome.extra_files.carried);
  print_findings("note: ", plan.notes, terminal);
  warn_of_optimizer_keys(outcome.plan.changes, terminal);
  if (!plan.problems.empty()) {
    print_findings("ckpt-reshard: ", plan.problems, terminal);
    if (options.json) print_json(options, outcome, reader, terminal);
    return ExitCode::bad_input;
  }
  const auto start = std::chrono::steady_clock::now();
  formats::CreateOptions create = create_options(options, files, wanted);
  create.extra_files = outcome.extra_files.carried;
  if (options.dry_run) {
    reshard::check_move(plan, reader, fs, options.destination, create);
  } else {
    move(options, create, outcome, reader, terminal, signals.token());
    if (options.overwrite) warn_of_left_over(fs, options.destination, terminal);
  }
  if (options.dry_run) {
    print_outcome(options, outcome, reader, start, terminal);
  } else {
    print_complete(options, outcome, reader, start, terminal);
  }
  return ExitCode::done;
}

}  // namespace tessera::cli
