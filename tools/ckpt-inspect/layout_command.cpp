#include "ckpt-inspect/layout_command.h"

#include <algorithm>

#include "ckpt-inspect/json_parts.h"
#include "cli/sizes.h"
#include "cli/table.h"
#include "tessera/inspect/layout_map.h"

namespace tessera::cli {
namespace {

using formats::CheckpointReader;
using inspect::TreeNode;

constexpr int kTextColumns = 48;  // for the name and the pattern, beside the map
constexpr int kMinMapColumns = 16;
constexpr int kMaxMapColumns = 64;
constexpr std::size_t kTickColumns = 8;

// Tensors that are alike, as one line of the map.
struct Row {
  std::string name;
  std::size_t tensor;
};

void append_rows(const TreeNode& node, const std::string& prefix, std::vector<Row>& rows) {
  const std::string name = prefix.empty() ? node.label : prefix + "." + node.label;
  if (node.kind == TreeNode::Kind::tensor) rows.push_back({name, node.index});
  for (const TreeNode& child : node.children) append_rows(child, name, rows);
}

// Returns how the tensor is cut, and an embedding table's sharding type: `dim 0 / 4, row_wise`.
std::string cut_in_words(const formats::TensorEntry& tensor,
                         const inspect::LayoutPattern& pattern) {
  std::string text = inspect::layout_pattern_to_string(pattern);
  if (const auto sharding = inspect::table_sharding(tensor)) {
    text.append(", ").append(table_sharding_name(*sharding));
  }
  return text;
}

// Returns rank numbers over their columns: `0123`, or `0       8       16`.
std::string axis(std::size_t world_size, std::size_t step) {
  const std::size_t num_columns = (world_size + step - 1) / step;
  const std::size_t tick_columns = world_size <= 10 ? 1 : kTickColumns;
  std::string text;
  for (std::size_t column = 0; column < num_columns; column += tick_columns) {
    const std::string label = std::to_string(column * step);
    if (column > 0 && column + label.size() > num_columns) break;
    text.append(column - text.size(), ' ');
    text += label;
  }
  return text;
}

struct RankTotals {
  std::vector<std::int64_t> num_pieces;
  std::vector<std::int64_t> nbytes;
};

RankTotals totals_by_rank(const CheckpointReader& reader, const inspect::Selection& selection) {
  const auto world_size = static_cast<std::size_t>(reader.contents().world_size);
  RankTotals totals{std::vector<std::int64_t>(world_size), std::vector<std::int64_t>(world_size)};
  for (std::size_t t : selection.tensors) {
    const formats::TensorEntry& tensor = reader.contents().tensors[t];
    for (const formats::Piece& piece : tensor.pieces) {
      const auto rank = static_cast<std::size_t>(piece.rank);
      if (piece.rank < 0 || rank >= world_size) continue;
      ++totals.num_pieces[rank];
      totals.nbytes[rank] +=
          numel_of(piece.region) * static_cast<std::int64_t>(itemsize(tensor.meta.dtype));
    }
  }
  return totals;
}

void print_map(const CheckpointReader& reader, const inspect::Selection& selection,
               const LayoutOptions& options, Terminal& terminal) {
  const formats::CheckpointContents& contents = reader.contents();
  std::vector<Row> rows;
  const inspect::Folding folding{.tensors = options.all
                                                ? inspect::Folding::Tensors::none
                                                : inspect::Folding::Tensors::of_equal_pieces};
  const TreeNode root = make_tree(contents, selection, folding);
  for (const TreeNode& node : root.children) append_rows(node, "", rows);

  const auto world_size = static_cast<std::size_t>(contents.world_size);
  const auto map_width = static_cast<std::size_t>(
      std::clamp(terminal.width() - kTextColumns, kMinMapColumns, kMaxMapColumns));
  const std::size_t step = inspect::shares_per_character(world_size, map_width);
  using enum Table::Align;
  Table table({left, left, left});
  table.let_shrink(0);
  table.add_row({{"rank", Style::faint}, {axis(world_size, step), Style::faint}});
  for (const Row& row : rows) {
    const formats::TensorEntry& tensor = contents.tensors[row.tensor];
    const inspect::LayoutPattern pattern = inspect::layout_pattern(tensor);
    const bool is_broken = pattern.cut == inspect::LayoutPattern::Cut::incomplete;
    table.add_row(
        {{printable(row.name, row.name.size() * 4)},
         {inspect::draw_shares(inspect::numel_by_rank(tensor, contents.world_size), map_width)},
         {cut_in_words(tensor, pattern), is_broken ? Style::bad : Style::plain}});
  }
  const RankTotals totals = totals_by_rank(reader, selection);
  const auto [least, most] = std::minmax_element(totals.nbytes.begin(), totals.nbytes.end());
  if (least != totals.nbytes.end()) {
    const std::string low = iec_size(static_cast<std::uint64_t>(*least));
    const std::string high = iec_size(static_cast<std::uint64_t>(*most));
    table.add_row({{"bytes of each rank", Style::strong},
                   {inspect::draw_shares(totals.nbytes, map_width), Style::strong},
                   {low == high ? high : low + " - " + high, Style::strong,
                    Table::Cell::Extent::rest_of_line}});
  }
  table.print(terminal);
  std::string legend = "· holds nothing, ▁ to █ up to the row's largest share";
  if (step > 1) legend += "; one column is " + counted(step, "rank");
  terminal.print("\n" + terminal.styled(Style::faint, legend) + "\n");
  terminal.print(terminal.styled(
                     Style::strong,
                     counts_in_words(selection.totals) + " in " +
                         counted(static_cast<std::uint64_t>(selection.totals.num_pieces), "piece") +
                         "; " + format_in_words(reader)) +
                 "\n");
}

void print_json(const CheckpointReader& reader, const inspect::Selection& selection,
                Terminal& terminal) {
  const formats::CheckpointContents& contents = reader.contents();
  JsonOutput json(terminal, kInspectJsonSchema);
  json.member("format", format_name(reader.format()));
  json.member("world_size", contents.world_size).key("tensors").begin_array();
  for (std::size_t t : selection.tensors) {
    const formats::TensorEntry& tensor = contents.tensors[t];
    json.begin_object().member("name", tensor.meta.fqn);
    json.member("dtype", dtype_name(tensor.meta.dtype)).key("shape").value(tensor.meta.shape);
    json.member("layout", layout_pattern_to_string(inspect::layout_pattern(tensor)));
    if (const auto sharding = inspect::table_sharding(tensor)) {
      json.member("sharding", table_sharding_name(*sharding));
    }
    json.key("pieces").begin_array();
    for (const formats::Piece& piece : tensor.pieces) {
      json.begin_object().member("rank", piece.rank).key("region");
      write_region(json, piece.region);
      json.end_object();
    }
    json.end_array().end_object();
  }
  json.end_array().key("ranks").begin_array();
  const RankTotals totals = totals_by_rank(reader, selection);
  for (std::size_t rank = 0; rank < totals.nbytes.size(); ++rank) {
    json.begin_object().member("rank", std::uint64_t{rank});
    json.member("pieces", totals.num_pieces[rank]).member("nbytes", totals.nbytes[rank]);
    json.end_object();
  }
  json.end_array();
  json.finish();
}

}  // namespace

void add_layout_command(CommandLine& line, LayoutOptions& options, Terminal& terminal) {
  Command& command = line.add_command("layout", "Maps which rank holds how much of which tensor",
                                      [&] { return run_layout(options, terminal); });
  command.describe(
      "A line ends with how the tensor is cut: `whole`; `dim 0 / 4`: along dimension 0 into 4; "
      "`flat / 4`: into ranges of its row-major order; `boxes / 4`. `× 2`: every piece is there "
      "twice. Embedding tables have their sharding type beside it. Layers that are cut alike share "
      "a line.");
  add_source_arguments(command, options.source);
  command.flag("--all", options.all, "Show alike layers one by one")
      .flag("--json", options.json, "Print JSON, with every piece's region");
  add_flat_layout_option(command, options.source);
  command.example("layout step-1000 model", "The model's parameters by rank");
}

ExitCode run_layout(const LayoutOptions& options, Terminal& terminal) {
  const auto reader = open_source(options.source);
  const inspect::Selection selection = select_names(*reader, options.source);
  if (options.json) {
    print_json(*reader, selection, terminal);
  } else {
    print_map(*reader, selection, options, terminal);
  }
  return ExitCode::done;
}

}  // namespace tessera::cli
