#include "ckpt-inspect/diff_command.h"

#include <array>
#include <cstdio>
#include <map>

#include "base/size_text.h"
#include "ckpt-inspect/json_members.h"
#include "ckpt-inspect/quantized.h"
#include "cli/table.h"
#include "formats/per_rank_rules.h"

namespace tessera::cli {
namespace {

using inspect::Difference;
using inspect::ElementDifferences;

std::string elements_in_words(const ElementDifferences& elements) {
  std::string text = std::to_string(elements.num_different) + " of " +
                     std::to_string(elements.numel) + " differ, first at " +
                     shape_to_string(elements.first_index) + ": " + elements.first_a +
                     " != " + elements.first_b;
  if (elements.num_different > 1 && elements.max_abs_difference) {
    std::array<char, 32> largest{};
    std::snprintf(largest.data(), largest.size(), "%.6g", *elements.max_abs_difference);
    text += std::string(", by at most ") + largest.data();
  }
  if (elements.num_nan_on_one_side > 0) {
    text += ", " + std::to_string(elements.num_nan_on_one_side) + " NaN on one side";
  }
  return text;
}

std::string in_words(const Difference& difference) {
  switch (difference.kind) {
    case Difference::Kind::elements:
      return elements_in_words(*difference.elements);
    case Difference::Kind::missing:
      return difference.a + ", only in A";
    case Difference::Kind::extra:
      return difference.b + ", only in B";
    case Difference::Kind::refused:
      return "A: " + difference.a + "; B: " + difference.b;
    default:
      return difference.a + " != " + difference.b;
  }
}

std::string ties_in_words(const inspect::Untied& untied) {
  if (untied.target_b.empty()) return "tied to " + printable(untied.target_a) + " in A, not in B";
  if (untied.target_a.empty()) return "tied to " + printable(untied.target_b) + " in B, not in A";
  return "tied to " + printable(untied.target_a) + " in A, to " + printable(untied.target_b) +
         " in B";
}

std::vector<Rename> parse_renames(const std::vector<std::string>& texts) {
  std::vector<Rename> renames;
  for (const std::string& text : texts) {
    const std::optional<Rename> rename = parse_rename(text);
    if (!rename) {
      throw UsageError("--rename: expected FROM=TO, found '" + printable(text) + "'",
                       "ckpt-inspect diff --help");
    }
    renames.push_back(*rename);
  }
  return renames;
}

/// Finds the parts of quantized weights in both checkpoints, by their names in B.
class QuantizedNames {
 public:
  QuantizedNames(const formats::CheckpointReader& a, const formats::CheckpointReader& b,
                 const std::vector<Rename>& renames)
      : of_a_(quantized_tensors_of(a)), of_b_(quantized_tensors_of(b)) {
    add(of_b_, b.contents(), {});
    add(of_a_, a.contents(), renames);
  }

  struct Named {
    const formats::QuantizedTensors* quantized;
    const formats::QuantizedPart* part;
  };
  /// Returns the part with this name; the part of B if both have one; null if neither has one.
  const Named* find(const std::string& name) const {
    const auto found = parts_.find(name);
    return found == parts_.end() ? nullptr : &found->second;
  }

 private:
  void add(const formats::QuantizedTensors& quantized, const formats::CheckpointContents& contents,
           const std::vector<Rename>& renames) {
    if (quantized.empty()) return;
    for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
      const formats::QuantizedPart* const part = quantized.find(t);
      if (part == nullptr) continue;
      parts_.emplace(formats::name_after_renames(contents.tensors[t].meta.fqn, renames),
                     Named{&quantized, part});
    }
  }

  const formats::QuantizedTensors of_a_;
  const formats::QuantizedTensors of_b_;
  std::map<std::string, Named> parts_;
};

void print_note_of_codes(const inspect::DiffReport& report, const QuantizedNames& quantized,
                         Terminal& terminal) {
  CodesNote note;
  for (const Difference& difference : report.differences) {
    const auto* const named = quantized.find(difference.name);
    if (named == nullptr || named->part->role != formats::kCodesRole) continue;
    note.add(difference.name, named->quantized->scheme_in_words(*named->part));
  }
  note.print(terminal);
}

void print_json(const inspect::DiffReport& report, const QuantizedNames& quantized,
                Terminal& terminal) {
  JsonOutput json(terminal, kInspectJsonSchema);
  json.member("equal", report.differences.empty());
  json.key("compared").begin_object().member("tensors", report.num_tensors_compared);
  json.member("values", report.num_values_compared).member("nbytes", report.nbytes_compared);
  json.end_object();
  json.key("differences").begin_array();
  for (const Difference& difference : report.differences) {
    json.begin_object();
    write_difference(json, difference);
    if (const auto* const named = quantized.find(difference.name)) {
      write_quantized(json, *named->quantized, *named->part);
    }
    json.end_object();
  }
  json.end_array();
  json.key("untied").begin_array();
  for (const inspect::Untied& untied : report.untied) json.value(untied.name);
  json.end_array();
  json.key("other_keys").begin_array();
  for (const inspect::OtherKeys& other : report.other_keys) json.value(other.name);
  json.end_array();
  json.finish();
}

}  // namespace

void add_diff_command(CommandLine& line, DiffCommandOptions& options, Terminal& terminal) {
  Command& command =
      line.add_command("diff", "Compares two checkpoints of any formats and shardings",
                       [&] { return run_diff(options, terminal); });
  command.describe(
      "Without a tolerance, two elements are equal if all their bits are equal. With a tolerance, "
      "they are equal if |a - b| <= ATOL + RTOL * |b|, as in torch.allclose, and NaN equals NaN.");
  command.argument("A", options.path_a, "A checkpoint of any format")
      .argument("B", options.path_b, "The other checkpoint. Its format and sharding may differ")
      .arguments("GLOB...", options.patterns, "Only these names and everything below them")
      .option("--rename", "FROM=TO", options.renames,
              "Replace FROM at the start of names in A by TO, to match the names in B. Repeatable")
      .option("--rtol", "RTOL", options.rtol, "Relative tolerance (default: 0)")
      .option("--atol", "ATOL", options.atol, "Absolute tolerance (default: 0)")
      .flag("--ignore-dtype", options.ignore_dtype,
            "Compare tensors of different dtypes as numbers")
      .flag("--json", options.json, "Print JSON")
      .option("--flat-layout-a", "FILE", options.flat_layout_path_a,
              "JSON file: the parameters in the flat vectors of A (FSDP1 LOCAL_STATE_DICT)")
      .option("--flat-layout-b", "FILE", options.flat_layout_path_b,
              "The same for the flat vectors of B");
  add_as_dict_option(command, options.as_dict);
  add_recipe_options(command, options.recipe);
  add_work_options(command, options.work);
  command
      .example("diff step-1000 step-1000.8",
               "Check that a checkpoint at another world size has the same state")
      .example("diff step-1000 model.safetensors model --rtol 1e-2 --ignore-dtype",
               "Compare with an export in bfloat16")
      .example("diff net.pt step-1000 model --rename net.=model.",
               "Compare a model that has other names");
}

inspect::DiffReport compare(const formats::CheckpointReader& a, const formats::CheckpointReader& b,
                            inspect::DiffOptions options, const WorkOptions& work_options,
                            Terminal& terminal) {
  require_patterns_used(options.names, a, b, options.renames, terminal);
  Work work(terminal, "diff", inspect::diff_nbytes(a, b, options), work_options);
  options.scan = work.scan_options();
  return inspect::diff(a, b, options);
}

ExitCode run_diff(const DiffCommandOptions& options, Terminal& terminal) {
  const auto [a, b] = open_two_sources(
      {options.path_a, {}, options.flat_layout_path_a, options.as_dict, options.recipe},
      {options.path_b, {}, options.flat_layout_path_b, options.as_dict}, terminal);
  inspect::DiffOptions diff_options;
  diff_options.rtol = options.rtol;
  diff_options.atol = options.atol;
  if (options.ignore_dtype) diff_options.dtypes = inspect::DiffOptions::DTypes::any;
  diff_options.names = NameSelection(options.patterns);
  diff_options.renames = parse_renames(options.renames);
  const inspect::DiffReport report = compare(*a, *b, diff_options, options.work, terminal);
  const QuantizedNames quantized(*a, *b, diff_options.renames);
  require_sources_unchanged();
  const ExitCode code = report.differences.empty() ? ExitCode::done : ExitCode::findings;
  if (options.json) {
    print_json(report, quantized, terminal);
    return code;
  }
  using enum Table::Align;
  Table table({left, left});
  for (const Difference& difference : report.differences) {
    table.add_row({{std::string(kind_name(difference.kind)), Style::bad},
                   {printable(difference.name, difference.name.size() * 4)},
                   {in_words(difference), Style::plain, Table::Cell::Extent::rest_of_line}});
  }
  table.print(terminal);
  print_note_of_codes(report, quantized, terminal);
  for (const inspect::Untied& untied : report.untied) {
    terminal.print_error("note: " + printable(untied.name) + ": " + ties_in_words(untied));
  }
  if (!report.other_keys.empty()) {
    const inspect::OtherKeys& first = report.other_keys.front();
    const std::size_t count = report.other_keys.size();
    terminal.print_error("note: " + counted(count, "name") + (count == 1 ? " has" : " have") +
                         " other keys in the state dict of B: " + first.keys_a +
                         " != " + first.keys_b + (count == 1 ? "" : ", …"));
  }
  if (!report.differences.empty()) terminal.print("\n");
  const std::string compared =
      counted(static_cast<std::uint64_t>(report.num_tensors_compared), "tensor") + ", " +
      counted(static_cast<std::uint64_t>(report.num_values_compared), "value") + ", " +
      exact_size(report.nbytes_compared) + " compared";
  const std::string verdict =
      report.differences.empty()
          ? terminal.styled(Style::good, "equal")
          : terminal.styled(Style::bad, counted(report.differences.size(), "difference"));
  terminal.print(verdict + ": " + compared + "\n");
  return code;
}

}  // namespace tessera::cli
