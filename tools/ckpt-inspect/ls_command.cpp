#include "ckpt-inspect/ls_command.h"

#include <algorithm>

#include "base/size_text.h"
#include "cli/heap.h"
#include "cli/json_output.h"
#include "cli/table.h"
#include "inspect/tensor_digests.h"

namespace tessera::cli {
namespace {

using formats::CheckpointReader;

// A line of the list: a tensor under its own name or under an alias.
struct Row {
  std::string_view name;
  std::size_t tensor;
  bool is_alias;
};

std::vector<Row> rows_of(const formats::CheckpointContents& contents,
                         const inspect::Selection& selection) {
  std::vector<Row> rows;
  rows.reserve(selection.tensors.size() + selection.aliases.size());
  for (std::size_t t : selection.tensors) rows.push_back({contents.tensors[t].meta.fqn, t, false});
  for (std::size_t a : selection.aliases) {
    const formats::Alias& alias = contents.aliases[a];
    rows.push_back({alias.fqn, inspect::tensor_of(contents, alias), true});
  }
  if (!selection.aliases.empty()) {
    std::sort(rows.begin(), rows.end(), [](const Row& a, const Row& b) { return a.name < b.name; });
  }
  return rows;
}

// Returns the digests of the rows' tensors, one per row.
std::vector<std::string> digests_of(const CheckpointReader& reader, const std::vector<Row>& rows,
                                    const WorkOptions& options, Terminal& terminal) {
  std::vector<std::size_t> tensors;
  for (const Row& row : rows) tensors.push_back(row.tensor);
  std::sort(tensors.begin(), tensors.end());
  tensors.erase(std::unique(tensors.begin(), tensors.end()), tensors.end());
  std::uint64_t nbytes = 0;
  for (std::size_t t : tensors) nbytes += reader.contents().tensors[t].meta.nbytes();
  Work work(terminal, "sha256", nbytes, options);
  const std::vector<std::string> digests =
      inspect::compute_digests(reader, tensors, work.scan_options());
  std::vector<std::string> by_row;
  for (const Row& row : rows) {
    const auto at = std::lower_bound(tensors.begin(), tensors.end(), row.tensor);
    by_row.push_back(digests[static_cast<std::size_t>(at - tensors.begin())]);
  }
  return by_row;
}

void print_json(const CheckpointReader& reader, const inspect::Selection& selection,
                const std::vector<Row>& rows, const std::vector<std::string>& digests,
                const ExtraFiles& extra_files, Terminal& terminal) {
  const formats::CheckpointContents& contents = reader.contents();
  JsonOutput json(terminal, kInspectJsonSchema);
  write_source(json, reader.format().name(), reader.contents());
  extra_files.write(json);
  write_shared_nbytes(json, reader);
  json.key("tensors").begin_array();
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const formats::TensorEntry& tensor = contents.tensors[rows[r].tensor];
    json.begin_object();
    json.member("name", rows[r].name).member("dtype", dtype_name(tensor.meta.dtype));
    json.key("shape").value(tensor.meta.shape);
    json.member("nbytes", tensor.meta.nbytes());
    json.member("pieces", std::uint64_t{tensor.pieces.size()});
    if (rows[r].is_alias) json.member("alias_of", tensor.meta.fqn);
    if (!digests.empty()) json.member("sha256", digests[r]);
    json.end_object();
  }
  json.end_array();
  json.key("values").begin_object();
  for (std::size_t v : selection.values) {
    json.key(contents.values[v].name).raw(value_as_json(reader, v));
  }
  json.end_object();
  json.finish();
}

void print_tensors(const CheckpointReader& reader, const std::vector<Row>& rows,
                   const std::vector<std::string>& digests, Terminal& terminal) {
  const formats::CheckpointContents& contents = reader.contents();
  const bool are_all_whole = std::all_of(rows.begin(), rows.end(), [&](const Row& row) {
    return contents.tensors[row.tensor].pieces.size() == 1;
  });
  using enum Table::Align;
  Table table({left, left, left, left, right, right, right, left});
  table.let_shrink(1);
  table.let_alternate({4, 5}, 6);
  constexpr std::size_t kTextNbytesBesideName = 64;
  std::size_t text_nbytes = 0;
  for (const Row& row : rows) text_nbytes += row.name.size() + kTextNbytesBesideName;
  table.reserve(rows.size(), text_nbytes);
  const bool is_terminal = terminal.output_is_terminal();
  std::vector<Table::Cell> cells;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    const formats::TensorEntry& tensor = contents.tensors[rows[r].tensor];
    cells.clear();
    cells.push_back({digests.empty() ? "" : digests[r], Style::faint});
    cells.push_back({printable(rows[r].name, rows[r].name.size() * 4)});
    cells.push_back({std::string(dtype_name(tensor.meta.dtype))});
    cells.push_back({shape_to_string(tensor.meta.shape)});
    if (rows[r].is_alias) {
      cells.push_back(
          {"= " + printable(tensor.meta.fqn), Style::faint, Table::Cell::Extent::rest_of_line});
    } else {
      cells.push_back({counted(tensor.meta.nbytes(), "byte")});
      cells.push_back({rounded_size(tensor.meta.nbytes())});
      // On a narrow terminal, this column replaces the two columns before it.
      cells.push_back({is_terminal ? iec_size(tensor.meta.nbytes()) : ""});
      cells.push_back({are_all_whole ? "" : counted(tensor.pieces.size(), "piece"), Style::faint});
    }
    table.add_row(cells);
  }
  table.print(terminal);
}

void print_values(const CheckpointReader& reader, const inspect::Selection& selection,
                  Terminal& terminal) {
  using enum Table::Align;
  Table table({left, left});
  for (std::size_t v : selection.values) {
    const ValueWords value = value_in_words(reader, v);
    const std::string& name = reader.contents().values[v].name;
    table.add_row({{printable(name, name.size() * 4)},
                   {value.type},
                   {value.text, Style::plain, Table::Cell::Extent::rest_of_line}});
  }
  table.print(terminal);
}

}  // namespace

void add_ls_command(CommandLine& line, LsOptions& options, Terminal& terminal) {
  Command& command = line.add_command("ls", "Lists tensors, sorted by name",
                                      [&] { return run_ls(options, terminal); });
  add_source_arguments(command, options.source);
  command
      .flag("--values", options.values,
            "Also list values (everything that is not a tensor), such as steps and hyperparameters")
      .flag("--sha256", options.sha256,
            "Add the SHA-256 of each tensor's bytes in row-major order. It is the same in every "
            "format and sharding")
      .flag("--json", options.json, "Print JSON, including all values");
  add_flat_layout_option(command, options.source);
  add_as_dict_option(command, options.source.as_dict);
  add_recipe_options(command, options.source.recipe);
  add_work_options(command, options.work);
  command.example("ls step-1000", "List all tensors")
      .example("ls step-1000 model '!*.bias'", "List the tensors of the model, without biases")
      .example("ls --json --sha256 step-1000", "Print JSON with digests, for a program");
}

ExitCode run_ls(const LsOptions& options, Terminal& terminal) {
  if (!options.sha256) let_heap_use_huge_pages();
  const auto* const reader = open_source(options.source, terminal);
  const inspect::Selection selection = select_names(*reader, options.source);
  const std::vector<Row> rows = rows_of(reader->contents(), selection);
  std::vector<std::string> digests;
  if (options.sha256) digests = digests_of(*reader, rows, options.work, terminal);
  const ExtraFiles extra_files = find_extra_files(*reader, options.source);
  require_sources_unchanged();
  if (options.json) {
    print_json(*reader, selection, rows, digests, extra_files, terminal);
    require_sources_unchanged();
    return ExitCode::done;
  }
  print_tensors(*reader, rows, digests, terminal);
  if (options.values && !selection.values.empty()) {
    if (!rows.empty()) terminal.print("\n");
    print_values(*reader, selection, terminal);
    require_sources_unchanged();
  }
  if (!selection.empty()) terminal.print("\n");
  std::string total = counts_in_words(selection.totals);
  if (!options.values && !selection.values.empty()) total += " (--values lists them)";
  total += "; " + counted(static_cast<std::uint64_t>(selection.totals.numel), "element") + ", " +
           exact_size(selection.totals.nbytes) + "; " + format_in_words(*reader) +
           extra_files.in_words();
  terminal.print(terminal.styled(Style::strong, total) + "\n");
  return ExitCode::done;
}

}  // namespace tessera::cli
