#include "ckpt-inspect/report_command.h"

#include <algorithm>
#include <optional>
#include <span>

#include "base/size_text.h"
#include "ckpt-inspect/diff_command.h"
#include "ckpt-inspect/json_members.h"
#include "ckpt-inspect/quantized.h"
#include "ckpt-inspect/report/page.h"
#include "cli/output_file.h"
#include "inspect/layout_map.h"
#include "reshard/optimizer_rules.h"

namespace tessera::cli {
namespace {

using formats::CheckpointContents;
using formats::CheckpointReader;
using formats::TensorEntry;

constexpr int kNumBins = 32;
constexpr std::size_t kMaxShares = 64;  // most cells that a tensor has in the map of ranks

struct Numbers {
  inspect::Statistics statistics;
  inspect::Histogram histogram;
};

// Returns the statistics and histogram of each tensor; an empty list with --no-stats.
std::vector<Numbers> compute_numbers(const CheckpointReader& reader,
                                     const std::vector<std::size_t>& tensors,
                                     const ReportOptions& options, Terminal& terminal) {
  if (options.no_stats) return {};
  std::uint64_t nbytes = 0;
  for (std::size_t t : tensors) nbytes += reader.contents().tensors[t].meta.nbytes();
  Work work(terminal, "report", 2 * nbytes, options.work);  // once for the range, once for the bins
  const auto statistics = inspect::compute_statistics(reader, tensors, work.scan_options());
  auto histograms =
      inspect::compute_histograms(reader, tensors, statistics, kNumBins, work.scan_options());
  std::vector<Numbers> numbers;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    numbers.push_back({statistics[i], std::move(histograms[i])});
  }
  return numbers;
}

// The user may name a checkpoint by mistake. So an existing file is replaced only if it is an HTML
// page (or empty).
void require_page_or_nothing(const FileSystem& fs, const std::string& path) {
  if (fs.kind_of(path) != FileKind::regular) return;
  const auto file = fs.open(path);
  const std::string_view expected =
      kReportPageBeforeData.substr(0, kReportPageBeforeData.find('\n'));
  std::string first(std::min<std::uint64_t>(expected.size(), file->nbytes()), '\0');
  file->read_at(0, std::as_writable_bytes(std::span(first)));
  if (first.empty() || first == expected) return;
  throw Error::expected(ErrorKind::invalid_argument, {.path = path}, "--overwrite", "an HTML page",
                        "another kind of file", "it was not changed");
}

// Escapes JSON for a script element: `<`, which JSON has only within strings, becomes an escape, so
// that no name ends the element or opens a comment. `write` must outlive the returned function.
JsonOutput::TextSink into_script(const JsonOutput::TextSink& write) {
  return [&write](std::string_view json) {
    for (std::size_t end = 0; (end = json.find('<')) != std::string_view::npos;) {
      write(json.substr(0, end));
      write("\\u003c");
      json.remove_prefix(end + 1);
    }
    write(json);
  };
}

void write_numbers(JsonOutput& json, const Numbers& numbers) {
  json.begin_object();
  write_statistics(json, numbers.statistics);
  json.key("histogram").begin_object().member("begin", numbers.histogram.begin);
  json.member("end", numbers.histogram.end).key("counts").value(numbers.histogram.counts);
  json.end_object().end_object();
}

// Writes the data about one checkpoint for the head of the page.
void write_source(JsonOutput& json, const CheckpointReader& reader,
                  const inspect::Selection& selection) {
  const inspect::Totals& totals = selection.totals;
  json.begin_object().member("name", last_component(reader.path()));
  const std::optional<formats::PartOfWhole>& part = reader.contents().part;
  json.member("format", format_in_words(reader) + (part ? "; " + part_in_words(*part) : ""));
  json.member("tensors", totals.num_tensors);
  json.member("aliases", totals.num_aliases).member("values", totals.num_values);
  json.member("pieces", totals.num_pieces).member("numel", totals.numel);
  json.member("nbytes", totals.nbytes).end_object();
}

// Writes what a tensor is of a quantized weight, such as its codes: their statistics are not those
// of the weight.
void write_quantized_words(JsonOutput& json, const char* member,
                           const formats::QuantizedTensors& quantized, std::size_t tensor_index) {
  if (const formats::QuantizedPart* const part = quantized.find(tensor_index)) {
    json.member(member, quantized.in_words(*part));
  }
}

void write_tensor(JsonOutput& json, const CheckpointContents& contents, const TensorEntry& tensor,
                  const reshard::StateRole& role, int world_size) {
  json.member("name", tensor.meta.fqn).member("dtype", dtype_name(tensor.meta.dtype));
  json.key("shape").value(tensor.meta.shape);
  json.member("nbytes", tensor.meta.nbytes()).member("pieces", std::uint64_t{tensor.pieces.size()});
  if (role.kind != formats::StateKind::plain) json.member("kind", state_kind_name(role.kind));
  if (role.parameter_index) {
    json.member("parameter", contents.tensors[*role.parameter_index].meta.fqn);
  }
  json.member("layout", layout_pattern_to_string(inspect::layout_pattern(tensor)));
  json.member("shares",
              inspect::draw_shares(inspect::numel_by_rank(tensor, world_size), kMaxShares));
}

void write_ranks(JsonOutput& json, const CheckpointContents& contents,
                 const inspect::Selection& selection, int world_size) {
  std::vector<std::uint64_t> nbytes(static_cast<std::size_t>(world_size));
  for (std::size_t t : selection.tensors) {
    const TensorEntry& tensor = contents.tensors[t];
    const auto numels = inspect::numel_by_rank(tensor, world_size);
    for (std::size_t rank = 0; rank < nbytes.size(); ++rank) {
      nbytes[rank] += static_cast<std::uint64_t>(numels[rank]) * itemsize(tensor.meta.dtype);
    }
  }
  json.member("ranks_per_share",
              std::uint64_t{inspect::shares_per_character(nbytes.size(), kMaxShares)});
  json.key("ranks").begin_array();
  for (std::uint64_t each : nbytes) json.value(each);
  json.end_array();
}

void write_checkpoint(JsonOutput& json, const CheckpointReader& reader,
                      const inspect::Selection& selection, const std::vector<Numbers>& numbers,
                      const formats::QuantizedTensors& quantized) {
  const CheckpointContents& contents = reader.contents();
  const int world_size = std::max(1, contents.world_size);
  write_source(json.key("source"), reader, selection);
  write_ranks(json, contents, selection, world_size);
  const std::vector<reshard::StateRole> roles = reshard::classify_state(contents);
  json.key("tensors").begin_array();
  for (std::size_t i = 0; i < selection.tensors.size(); ++i) {
    json.begin_object();
    const std::size_t t = selection.tensors[i];
    write_tensor(json, contents, contents.tensors[t], roles[t], world_size);
    write_quantized_words(json, "quantized", quantized, t);
    if (!numbers.empty()) write_numbers(json.key("numbers"), numbers[i]);
    json.end_object();
  }
  json.end_array().key("aliases").begin_array();
  for (std::size_t a : selection.aliases) {
    const formats::Alias& alias = contents.aliases[a];
    json.begin_object().member("name", alias.fqn).member("alias_of", alias.target).end_object();
  }
  json.end_array().key("values").begin_array();
  for (std::size_t v : selection.values) {
    const ValueWords value = value_in_words(reader, v);
    json.begin_object().member("name", contents.values[v].name);
    json.member("type", value.type).member("text", value.text).end_object();
  }
  json.end_array();
}

// Returns the index of the tensor with this name, which may be the name of an alias.
std::optional<std::size_t> find_tensor(const CheckpointContents& contents,
                                       const std::string& name) {
  const TensorEntry* tensor = contents.find_tensor(name);
  const auto alias = std::find_if(contents.aliases.begin(), contents.aliases.end(),
                                  [&](const formats::Alias& each) { return each.fqn == name; });
  if (tensor == nullptr && alias != contents.aliases.end()) {
    tensor = contents.find_tensor(alias->target);
  }
  if (tensor == nullptr) return std::nullopt;
  return static_cast<std::size_t>(tensor - contents.tensors.data());
}

// Returns statistics and histograms of tensors whose elements differ, in the differences' order.
// Empty with --no-stats.
std::vector<Numbers> numbers_of_differing(const CheckpointReader& reader,
                                          const inspect::DiffReport& report,
                                          const ReportOptions& options, Terminal& terminal) {
  std::vector<std::size_t> tensors;
  for (const inspect::Difference& difference : report.differences) {
    if (difference.elements) {
      tensors.push_back(find_tensor(reader.contents(), difference.name).value());
    }
  }
  return compute_numbers(reader, tensors, options, terminal);
}

void write_comparison(JsonOutput& json, const CheckpointReader& a, const CheckpointReader& b,
                      const inspect::DiffReport& report, const std::vector<Numbers>& numbers_a,
                      const std::vector<Numbers>& numbers_b,
                      const formats::QuantizedTensors& quantized_a,
                      const formats::QuantizedTensors& quantized_b) {
  json.key("compared").begin_object().member("tensors", report.num_tensors_compared);
  json.member("values", report.num_values_compared).member("nbytes", report.nbytes_compared);
  json.end_object().key("differences").begin_array();
  std::size_t next = 0;
  for (const inspect::Difference& difference : report.differences) {
    json.begin_object();
    write_difference(json, difference);
    if (difference.elements) {
      for (const CheckpointReader* reader : {&a, &b}) {
        const CheckpointContents& contents = reader->contents();
        const bool is_a = reader == &a;
        const std::size_t t = find_tensor(contents, difference.name).value();
        const TensorMeta& meta = contents.tensors[t].meta;
        json.member(is_a ? "a" : "b",
                    std::string(dtype_name(meta.dtype)) + " " + shape_to_string(meta.shape));
        write_quantized_words(json, is_a ? "quantized_a" : "quantized_b",
                              is_a ? quantized_a : quantized_b, t);
      }
      if (!numbers_a.empty()) {
        write_numbers(json.key("numbers_a"), numbers_a[next]);
        write_numbers(json.key("numbers_b"), numbers_b[next]);
        ++next;
      }
    }
    json.end_object();
  }
  json.end_array().key("untied").begin_array();
  for (const inspect::Untied& untied : report.untied) json.value(untied.name);
  json.end_array();
}

// Counts a tensor in the note if its elements are codes.
void add_codes(CodesNote& note, const CheckpointReader& reader,
               const formats::QuantizedTensors& quantized, std::size_t tensor_index) {
  if (!quantized.are_codes(tensor_index)) return;
  note.add(reader.contents().tensors[tensor_index].meta.fqn,
           quantized.scheme_in_words(*quantized.find(tensor_index)));
}

// Writes the page. `write_data` writes the data inside it.
template <class WriteData>
void write_page(const JsonOutput::TextSink& write, WriteData write_data) {
  write(kReportPageBeforeData);
  JsonOutput json(into_script(write), kInspectJsonSchema);
  write_data(json);
  json.finish();
  write(kReportPageAfterData);
}

std::string report_on_one(const ReportOptions& options, const JsonOutput::TextSink& write,
                          Terminal& terminal) {
  const SourceOptions source{options.path, options.patterns, options.flat_layout_path,
                             options.as_dict, options.recipe};
  const auto* const reader = open_source(source, terminal);
  const inspect::Selection selection = select_with_tensors_of_aliases(*reader, source);
  const auto numbers = compute_numbers(*reader, selection.tensors, options, terminal);
  const formats::QuantizedTensors quantized = quantized_tensors_of(*reader);
  write_page(write, [&](JsonOutput& json) {
    write_checkpoint(json, *reader, selection, numbers, quantized);
  });
  CodesNote note;
  for (const std::size_t t : selection.tensors) add_codes(note, *reader, quantized, t);
  if (!numbers.empty()) note.print(terminal);
  return counts_in_words(selection.totals) + "; " + exact_size(selection.totals.nbytes) + "; " +
         format_in_words(*reader);
}

std::string report_on_two(const ReportOptions& options, const JsonOutput::TextSink& write,
                          Terminal& terminal) {
  const auto [a, b] = open_two_sources(
      {options.path, {}, options.flat_layout_path, options.as_dict, options.recipe},
      {options.other_paths.front(), {}, options.flat_layout_path_b, options.as_dict}, terminal);
  inspect::DiffOptions diff_options{
      .rtol = options.rtol, .atol = options.atol, .names = NameSelection(options.patterns)};
  if (options.ignore_dtype) diff_options.dtypes = inspect::DiffOptions::DTypes::any;
  const inspect::DiffReport report = compare(*a, *b, diff_options, options.work, terminal);
  const auto numbers_a = numbers_of_differing(*a, report, options, terminal);
  const auto numbers_b = numbers_of_differing(*b, report, options, terminal);
  const formats::QuantizedTensors quantized_a = quantized_tensors_of(*a);
  const formats::QuantizedTensors quantized_b = quantized_tensors_of(*b);
  write_page(write, [&](JsonOutput& json) {
    write_source(json.key("a"), *a, inspect::select(a->contents(), {}, a->path()));
    write_source(json.key("b"), *b, inspect::select(b->contents(), {}, b->path()));
    write_comparison(json, *a, *b, report, numbers_a, numbers_b, quantized_a, quantized_b);
  });
  CodesNote note;
  for (const inspect::Difference& difference : report.differences) {
    if (!difference.elements) continue;
    const std::size_t in_b = find_tensor(b->contents(), difference.name).value();
    if (quantized_b.are_codes(in_b)) {
      add_codes(note, *b, quantized_b, in_b);
    } else {
      add_codes(note, *a, quantized_a, find_tensor(a->contents(), difference.name).value());
    }
  }
  if (!numbers_a.empty()) note.print(terminal);
  return report.differences.empty() ? "equal" : counted(report.differences.size(), "difference");
}

}  // namespace

void add_report_command(CommandLine& line, ReportOptions& options, Terminal& terminal) {
  Command& command =
      line.add_command("report", "Writes an HTML page that shows a checkpoint, or how two differ",
                       [&] { return run_report(options, terminal); });
  command.describe(
      "The page shows bytes by prefix, ranks and dtypes. For each tensor it has a histogram and "
      "statistics, with the optimizer state beside the weight. It needs no network and no other "
      "file.");
  command.argument("PATH", options.path, kPathHelp)
      .arguments("B", options.other_paths, "Another checkpoint: the page shows how the two differ")
      .option("-o,--output", "FILE", options.output_path,
              "The page to write. - is standard output. Required")
      .flag("--overwrite", options.overwrite, "Replace FILE if it exists")
      .option("--only", "GLOB", options.patterns,
              "Only these names and everything below them. Repeatable")
      .flag("--no-stats", options.no_stats, "Do not read elements: faster, but without statistics")
      .option("--rtol", "RTOL", options.rtol, "With B: relative tolerance, as in diff")
      .option("--atol", "ATOL", options.atol, "With B: absolute tolerance, as in diff")
      .flag("--ignore-dtype", options.ignore_dtype,
            "With B: compare tensors of different dtypes as numbers")
      .option("--flat-layout", "FILE", options.flat_layout_path,
              "JSON file: the parameters in the flat vectors of PATH (FSDP1 LOCAL_STATE_DICT)")
      .option("--flat-layout-b", "FILE", options.flat_layout_path_b,
              "The same for the flat vectors of B");
  add_as_dict_option(command, options.as_dict);
  add_recipe_options(command, options.recipe);
  add_work_options(command, options.work);
  command.example("report step-1000 -o report.html", "Show a whole checkpoint")
      .example("report step-1000 step-2000 -o changes.html --only model --rtol 1e-3",
               "Show what training has changed in the model");
}

ExitCode run_report(const ReportOptions& options, Terminal& terminal) {
  const std::string help = "ckpt-inspect report --help";
  if (options.output_path.empty()) {
    throw UsageError("-o FILE is missing: the file to write the page to", help);
  }
  if (options.other_paths.size() > 1) {
    throw UsageError("unexpected argument '" + printable(options.other_paths[1]) + "'", help);
  }
  const auto report_to = [&](const JsonOutput::TextSink& write) {
    return options.other_paths.empty() ? report_on_one(options, write, terminal)
                                       : report_on_two(options, write, terminal);
  };
  if (options.output_path == kStandardOutput) {
    report_to([&](std::string_view text) { terminal.print(text); });
    require_sources_unchanged();
    return ExitCode::done;
  }
  if (options.overwrite) require_page_or_nothing(FileSystem::posix(), options.output_path);
  OutputFile file(FileSystem::posix(), options.output_path,
                  options.overwrite ? OverwritePolicy::replace : OverwritePolicy::refuse, "-o");
  const std::string summary = report_to([&](std::string_view text) { file.write(text); });
  require_sources_unchanged();
  file.commit();
  terminal.print(printable(options.output_path) + ": " + summary + "\n");
  return ExitCode::done;
}

}  // namespace tessera::cli
