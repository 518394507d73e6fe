#include "ckpt-inspect/tree_command.h"

#include "base/json.h"
#include "base/size_text.h"
#include "cli/heap.h"
#include "cli/json_output.h"
#include "cli/table.h"

namespace tessera::cli {
namespace {

using formats::CheckpointReader;
using inspect::TreeNode;

constexpr const char* kTimes = "× ";

bool holds_only_values(const TreeNode& node) {
  return node.totals.num_tensors == 0 && node.totals.num_aliases == 0;
}

class TreePrinter {
 public:
  TreePrinter(const CheckpointReader& reader, const TreeOptions& options)
      : reader_(reader), options_(options) {
    table_.let_shrink(0);
    table_.let_alternate({3, 4}, 5);
  }

  void add(const TreeNode& node, int depth, std::int64_t num_ancestor_repeats = 1) {
    const std::int64_t num_alike = num_ancestor_repeats * node.num_repeats;
    const std::string label = std::string(2 * static_cast<std::size_t>(depth), ' ') +
                              printable(node.label, node.label.size() * 4);
    const std::string repeats =
        node.num_repeats > 1 ? std::to_string(node.num_repeats) + " " + kTimes : "";
    switch (node.kind) {
      case TreeNode::Kind::group:
        add_group(node, label, repeats, depth, num_alike);
        break;
      case TreeNode::Kind::tensor: {
        const TensorMeta& meta = reader_.contents().tensors[node.index].meta;
        table_.add_row({{label},
                        {repeats + std::string(dtype_name(meta.dtype))},
                        {shape_to_string(meta.shape)},
                        {counted(node.totals.nbytes, "byte")},
                        {rounded_size(node.totals.nbytes)},
                        {iec_size(node.totals.nbytes)}});
        break;
      }
      case TreeNode::Kind::alias:
        table_.add_row({{label},
                        {repeats + "= " + printable(node.target), Style::faint,
                         Table::Cell::Extent::rest_of_line}});
        break;
      case TreeNode::Kind::value:
        add_value(node, label, num_alike);
        break;
    }
  }

  void print(Terminal& terminal) const { table_.print(terminal); }

 private:
  void add_group(const TreeNode& node, const std::string& label, const std::string& repeats,
                 int depth, std::int64_t num_alike) {
    inspect::Totals each = node.totals;
    each.num_tensors /= node.num_repeats;
    each.num_values /= node.num_repeats;
    each.num_aliases /= node.num_repeats;
    std::vector<Table::Cell> cells = {{label, Style::strong}};
    if (holds_only_values(node)) {
      cells.push_back({repeats + counted(static_cast<std::uint64_t>(each.num_values), "value"),
                       Style::faint, Table::Cell::Extent::rest_of_line});
    } else {
      cells.push_back({repeats + counted(static_cast<std::uint64_t>(each.num_tensors), "tensor"),
                       Style::faint});
      cells.push_back({});
      cells.push_back({counted(node.totals.nbytes, "byte"), Style::faint});
      cells.push_back({rounded_size(node.totals.nbytes), Style::faint});
      cells.push_back({iec_size(node.totals.nbytes), Style::faint});
    }
    table_.add_row(cells);
    if (holds_only_values(node) && !options_.values) return;
    if (options_.depth > 0 && depth + 1 >= options_.depth) return;
    for (const TreeNode& child : node.children) add(child, depth + 1, num_alike);
  }

  // `num_alike`: how many values share the line, because they or their groups are folded (equal
  // layers in one line).
  void add_value(const TreeNode& node, const std::string& label, std::int64_t num_alike) {
    if (num_alike > 1) {
      table_.add_row({{label},
                      {counted(static_cast<std::uint64_t>(num_alike), "value"), Style::faint,
                       Table::Cell::Extent::rest_of_line}});
      return;
    }
    const ValueWords value = value_in_words(reader_, node.index);
    table_.add_row(
        {{label}, {value.type}, {value.text, Style::plain, Table::Cell::Extent::rest_of_line}});
  }

  const CheckpointReader& reader_;
  const TreeOptions& options_;
  Table table_{{Table::Align::left, Table::Align::left, Table::Align::left, Table::Align::right,
                Table::Align::right, Table::Align::right}};
};

void print_json(const CheckpointReader& reader, const TreeNode& node, int levels_left,
                JsonOutput& json) {
  const formats::CheckpointContents& contents = reader.contents();
  json.begin_object().member("label", node.label);
  if (node.num_repeats > 1) json.member("repeats", node.num_repeats);
  switch (node.kind) {
    case TreeNode::Kind::group:
      json.member("kind", "group");
      json.member("tensors", node.totals.num_tensors).member("aliases", node.totals.num_aliases);
      json.member("values", node.totals.num_values).member("nbytes", node.totals.nbytes);
      if (levels_left != 0) {
        json.key("children").begin_array();
        for (const TreeNode& child : node.children) {
          print_json(reader, child, levels_left - 1, json);
        }
        json.end_array();
      }
      break;
    case TreeNode::Kind::tensor: {
      const TensorMeta& meta = contents.tensors[node.index].meta;
      json.member("kind", "tensor").member("name", meta.fqn);
      json.member("dtype", dtype_name(meta.dtype)).key("shape").value(meta.shape);
      json.member("nbytes", node.totals.nbytes);
      break;
    }
    case TreeNode::Kind::alias:
      json.member("kind", "alias").member("name", contents.aliases[node.index].fqn);
      json.member("alias_of", contents.aliases[node.index].target);
      break;
    case TreeNode::Kind::value:
      json.member("kind", "value").member("name", contents.values[node.index].name);
      break;
  }
  json.end_object();
}

}  // namespace

void add_tree_command(CommandLine& line, TreeOptions& options, Terminal& terminal) {
  Command& command =
      line.add_command("tree", "Shows names as a tree with totals; equal layers share a line",
                       [&] { return run_tree(options, terminal); });
  command.describe(
      "`layers.[0:32]` stands for layers 0 to 31, if they have the same names, dtypes and shapes. "
      "Its line has the bytes of all 32 layers; the lines below it have the bytes of one.");
  add_source_arguments(command, options.source);
  command.option("--depth", "N", options.depth, "Number of levels to show (default: all)")
      .flag("--all", options.all, "Show equal layers one by one")
      .flag("--values", options.values,
            "Show values (everything that is not a tensor) one by one, not only their number")
      .flag("--json", options.json, "Print JSON");
  add_flat_layout_option(command, options.source);
  add_as_dict_option(command, options.source.as_dict);
  add_recipe_options(command, options.source.recipe);
  command.example("tree step-1000 --depth 2", "Show the two topmost levels")
      .example("step-1000 optim", "Show the optimizer state; you may leave out the verb");
}

ExitCode run_tree(const TreeOptions& options, Terminal& terminal) {
  let_heap_use_huge_pages();
  const auto* const reader = open_source(options.source, terminal);
  const inspect::Selection selection = select_names(*reader, options.source);
  inspect::Folding folding;
  if (options.all) folding.tensors = inspect::Folding::Tensors::none;
  if (options.values) folding.values = inspect::Folding::Values::none;
  const TreeNode root = make_tree(reader->contents(), selection, folding);
  const ExtraFiles extra_files = find_extra_files(*reader, options.source);
  if (options.json) {
    JsonOutput json(terminal, kInspectJsonSchema);
    write_source(json, reader->format().name(), reader->contents());
    extra_files.write(json);
    write_shared_nbytes(json, *reader);
    json.key("tree").begin_array();
    for (const TreeNode& child : root.children) {
      print_json(*reader, child, options.depth > 0 ? options.depth - 1 : -1, json);
    }
    json.end_array();
    json.finish();
    require_sources_unchanged();
    return ExitCode::done;
  }
  TreePrinter printer(*reader, options);
  for (const TreeNode& child : root.children) printer.add(child, 0);
  require_sources_unchanged();
  printer.print(terminal);
  if (!selection.empty()) terminal.print("\n");
  terminal.print(terminal.styled(Style::strong, counts_in_words(selection.totals) + "; " +
                                                    exact_size(selection.totals.nbytes) + "; " +
                                                    format_in_words(*reader) +
                                                    extra_files.in_words()) +
                 "\n");
  return ExitCode::done;
}

}  // namespace tessera::cli
