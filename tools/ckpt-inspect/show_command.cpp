#include "ckpt-inspect/show_command.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <limits>

#include "base/json.h"
#include "base/size_text.h"
#include "ckpt-inspect/json_members.h"
#include "ckpt-inspect/quantized.h"
#include "ckpt-inspect/tensor_preview.h"
#include "cli/table.h"

namespace tessera::cli {
namespace {

using formats::CheckpointReader;
using formats::PieceStorage;
using inspect::Histogram;
using inspect::Statistics;

constexpr std::size_t kBarWidth = 30;
constexpr std::size_t kMaxValueNbytes = std::size_t{1} << 20;

std::string names_of_tensor(const CheckpointReader& reader, std::size_t tensor) {
  std::string names;
  for (const formats::Alias& alias : reader.contents().aliases) {
    if (inspect::tensor_of(reader.contents(), alias) != tensor) continue;
    names += (names.empty() ? "" : ", ") + printable(alias.fqn);
  }
  return names;
}

std::string byte_range_in_words(const PieceStorage& storage) {
  if (!storage.byte_range) return exact_size(storage.stored_nbytes);
  return "bytes [" + std::to_string(storage.byte_range->begin) + ", " +
         std::to_string(storage.byte_range->end) + ")";
}

void print_pieces(const CheckpointReader& reader, std::size_t t, Terminal& terminal) {
  const formats::TensorEntry& tensor = reader.contents().tensors[t];
  using enum Table::Align;
  Table table({left, right, left, left, left, left});
  for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
    const PieceStorage storage = reader.piece_storage(t, p);
    table.add_row({{"  rank"},
                   {std::to_string(tensor.pieces[p].rank)},
                   {region_to_string(tensor.pieces[p].region)},
                   {printable(storage.file)},
                   {byte_range_in_words(storage)},
                   {storage.encoding, Style::faint}});
  }
  table.print(terminal);
}

std::string six_digits(const std::optional<double>& number) {
  if (!number) return "-";
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.6g", *number);
  return text.data();
}

std::string exact(const std::optional<inspect::Number>& number, DType dtype) {
  return number ? inspect::number_to_string(*number, dtype) : "-";
}

void print_statistics(const Statistics& statistics, DType dtype, Terminal& terminal) {
  using enum Table::Align;
  Table table({left, left, left, left});
  table.add_row(
      {{"  min"}, {exact(statistics.min, dtype)}, {"max"}, {exact(statistics.max, dtype)}});
  table.add_row({{"  mean"},
                 {six_digits(statistics.mean())},
                 {"std"},
                 {six_digits(statistics.standard_deviation())}});
  const auto count = [](std::int64_t n) { return std::to_string(n); };
  const auto alarm = [](std::int64_t n) { return n > 0 ? Style::bad : Style::plain; };
  const std::int64_t num_inf = statistics.num_positive_inf + statistics.num_negative_inf;
  table.add_row({{"  zeros"},
                 {count(statistics.num_zeros)},
                 {"NaN"},
                 {count(statistics.num_nan), alarm(statistics.num_nan)}});
  table.add_row({{"  Inf"},
                 {count(num_inf), alarm(num_inf)},
                 {num_inf > 0 ? "negative" : ""},
                 {num_inf > 0 ? count(statistics.num_negative_inf) : ""}});
  table.print(terminal);
}

std::string bin_edge(double edge, int num_digits) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.*g", num_digits, edge);
  return text.data();
}

// Returns the edges of bins as texts, with as many digits as neighbours need to differ.
std::vector<std::string> bin_edges(const Histogram& histogram) {
  const std::size_t num_bins = histogram.counts.size();
  std::vector<std::string> edges;
  for (int num_digits = 4; num_digits <= std::numeric_limits<double>::max_digits10; ++num_digits) {
    edges.clear();
    for (std::size_t bin = 0; bin <= num_bins; ++bin) {
      const double place = static_cast<double>(bin) / static_cast<double>(num_bins);
      edges.push_back(bin_edge(std::lerp(histogram.begin, histogram.end, place), num_digits));
    }
    if (std::ranges::adjacent_find(edges) == edges.end()) break;
  }
  return edges;
}

void print_histogram(const Histogram& histogram, Terminal& terminal) {
  const std::size_t num_bins = histogram.counts.size();
  const std::int64_t largest = *std::max_element(histogram.counts.begin(), histogram.counts.end());
  const std::vector<std::string> edges = bin_edges(histogram);
  using enum Table::Align;
  Table table({right, right, left});
  for (std::size_t bin = 0; bin < num_bins; ++bin) {
    const std::int64_t count = histogram.counts[bin];
    const double share =
        largest > 0 ? static_cast<double>(count) / static_cast<double>(largest) : 0;
    auto bar_width = static_cast<std::size_t>(std::lround(share * static_cast<double>(kBarWidth)));
    if (count > 0) bar_width = std::max<std::size_t>(1, bar_width);
    std::string bar;
    for (std::size_t i = 0; i < bar_width; ++i) bar += "█";
    table.add_row({{"  " + edges[bin]}, {std::to_string(count)}, {bar, Style::good}});
  }
  table.add_row({{"  " + edges.back()}});
  table.print(terminal);
}

struct TensorFacts {
  Statistics statistics;
  Histogram histogram;
};

TensorFacts facts_of(const CheckpointReader& reader, std::size_t t, const ShowOptions& options,
                     Terminal& terminal) {
  // Elements are read twice, because the histogram needs the range of all elements first.
  Work work(terminal, "show", 2 * reader.contents().tensors[t].meta.nbytes(), options.work);
  TensorFacts facts;
  facts.statistics = inspect::compute_statistics(reader, {&t, 1}, work.scan_options()).front();
  facts.histogram = inspect::compute_histogram(reader, t, facts.statistics, options.num_bins,
                                               work.scan_options());
  return facts;
}

void print_tensor(const CheckpointReader& reader, const formats::QuantizedTensors& quantized,
                  std::size_t t, const ShowOptions& options, Terminal& terminal) {
  const formats::TensorEntry& tensor = reader.contents().tensors[t];
  const auto title = [&](const std::string& text) {
    terminal.print(terminal.styled(Style::strong, text) + "\n");
  };
  title(printable(tensor.meta.fqn, tensor.meta.fqn.size() * 4));
  std::string line = "  " + std::string(dtype_name(tensor.meta.dtype)) + "  " +
                     shape_to_string(tensor.meta.shape) + "  " +
                     counted(static_cast<std::uint64_t>(tensor.meta.numel()), "element") + "  " +
                     exact_size(tensor.meta.nbytes());
  terminal.print(line + "\n");
  if (const formats::QuantizedPart* part = quantized.find(t)) {
    terminal.print("  " + quantized.in_words(*part) + "\n");
  }
  if (tensor.kind != formats::StateKind::plain) {
    terminal.print("  " + std::string(state_kind_name(tensor.kind)) + " state" +
                   (tensor.parameter.empty() ? "" : " of " + printable(tensor.parameter)) + "\n");
  }
  if (const std::string names = names_of_tensor(reader, t); !names.empty()) {
    terminal.print("  tied to " + names + "\n");
  }
  title("pieces");
  print_pieces(reader, t, terminal);

  // Throws for a tensor with missing elements. Its pieces are already printed then.
  const inspect::TensorReader elements(reader, t);
  if (tensor.meta.numel() == 0) return;
  const std::size_t num_dims = tensor.meta.shape.size();
  std::string which;
  for (std::size_t d = 0; num_dims > 2 && d < num_dims; ++d) {
    which += (d == 0 ? " [" : ", ") + std::string(d + 2 < num_dims ? "0" : ":");
  }
  title("elements" + (which.empty() ? which : which + "]"));
  const auto max_width = static_cast<std::size_t>(std::max(terminal.width() - 2, 1));
  for (const std::string& row : preview_lines(elements, max_width))
    terminal.print("  " + row + "\n");
  const TensorFacts facts = facts_of(reader, t, options, terminal);
  title("statistics");
  print_statistics(facts.statistics, tensor.meta.dtype, terminal);
  if (facts.histogram.counts.size() > 1) {
    title("histogram");
    print_histogram(facts.histogram, terminal);
  }
}

void write_tensor(const CheckpointReader& reader, const formats::QuantizedTensors& quantized,
                  std::size_t t, const ShowOptions& options, JsonOutput& json, Terminal& terminal) {
  const formats::TensorEntry& tensor = reader.contents().tensors[t];
  json.begin_object().member("name", tensor.meta.fqn);
  json.member("dtype", dtype_name(tensor.meta.dtype)).key("shape").value(tensor.meta.shape);
  json.member("nbytes", tensor.meta.nbytes()).member("kind", state_kind_name(tensor.kind));
  if (const formats::QuantizedPart* part = quantized.find(t)) {
    write_quantized(json, quantized, *part);
  }
  json.member("parameter", tensor.parameter).key("aliases").begin_array();
  for (const formats::Alias& alias : reader.contents().aliases) {
    if (inspect::tensor_of(reader.contents(), alias) == t) json.value(alias.fqn);
  }
  json.end_array().key("pieces").begin_array();
  for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
    const PieceStorage storage = reader.piece_storage(t, p);
    json.begin_object().member("rank", tensor.pieces[p].rank).key("region");
    write_region(json, tensor.pieces[p].region);
    json.member("file", storage.file);
    if (const auto& range = storage.byte_range) {
      json.key("byte_range").begin_array().value(range->begin).value(range->end).end_array();
    }
    json.member("encoding", storage.encoding).member("stored_nbytes", storage.stored_nbytes);
    json.end_object();
  }
  json.end_array();
  const TensorFacts facts = facts_of(reader, t, options, terminal);
  json.key("statistics").begin_object();
  write_statistics(json, facts.statistics);
  json.end_object().key("histogram").begin_object();
  json.member("begin", facts.histogram.begin).member("end", facts.histogram.end);
  json.key("counts").value(facts.histogram.counts).end_object().end_object();
}

}  // namespace

void add_show_command(CommandLine& line, ShowOptions& options, Terminal& terminal) {
  Command& command =
      line.add_command("show", "Shows tensors or values: ranks and pieces, elements, statistics",
                       [&] { return run_show(options, terminal); });
  command.argument("PATH", options.path, kPathHelp)
      .argument("TENSOR", options.name, "The name of a tensor or a value, or a glob")
      .arguments("TENSOR...", options.more_names, "More names or globs")
      .option("--bins", "N", options.num_bins,
              "Largest number of bins in the histogram (default: {})")
      .flag("--json", options.json, "Print JSON")
      .option("--flat-layout", "FILE", options.flat_layout_path,
              "JSON file: the parameters in the flat vectors (FSDP1 LOCAL_STATE_DICT)");
  add_as_dict_option(command, options.as_dict);
  add_recipe_options(command, options.recipe);
  add_work_options(command, options.work);
  command.example("show step-1000 model.emb.weight", "Show one tensor")
      .example("show step-1000 'optim.*.emb.weight.*'",
               "Show the optimizer state of one parameter");
}

ExitCode run_show(const ShowOptions& options, Terminal& terminal) {
  SourceOptions source{
      options.path, {options.name}, options.flat_layout_path, options.as_dict, options.recipe};
  source.patterns.insert(source.patterns.end(), options.more_names.begin(),
                         options.more_names.end());
  const auto* const reader = open_source(source, terminal);
  const inspect::Selection selection = select_with_tensors_of_aliases(*reader, source);
  const std::vector<std::size_t>& tensors = selection.tensors;
  const formats::QuantizedTensors quantized = quantized_tensors_of(*reader);
  if (options.json) {
    JsonOutput json(terminal, kInspectJsonSchema);
    write_source(json, reader->format().name(), reader->contents());
    json.key("tensors").begin_array();
    for (std::size_t t : tensors) write_tensor(*reader, quantized, t, options, json, terminal);
    json.end_array();
    json.key("values").begin_object();
    for (std::size_t v : selection.values) {
      json.key(reader->contents().values[v].name).raw(value_as_json(*reader, v));
    }
    json.end_object();
    json.finish();
    require_sources_unchanged();
    return ExitCode::done;
  }
  bool is_first = true;
  for (std::size_t t : tensors) {
    if (!is_first) terminal.print("\n");
    is_first = false;
    print_tensor(*reader, quantized, t, options, terminal);
  }
  if (!is_first && !selection.values.empty()) terminal.print("\n");
  for (std::size_t v : selection.values) {
    const Value value = reader->read_value(v);
    const std::string& name = reader->contents().values[v].name;
    terminal.print(terminal.styled(Style::strong, printable(name, name.size() * 4)) + "\n  " +
                   std::string(type_name(value)) + "  " + value_to_string(value, kMaxValueNbytes) +
                   "\n");
  }
  require_sources_unchanged();
  return ExitCode::done;
}

}  // namespace tessera::cli
