#include "ckpt-inspect/layout_command.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/size_text.h"
#include "ckpt-inspect/json_members.h"
#include "cli/table.h"
#include "formats/tensor_mesh.h"
#include "inspect/layout_map.h"
#include "reshard/tied_tables.h"
#include "tessera/base/file_system.h"
#include "tessera/layout/table_plan.h"

namespace tessera::cli {
namespace {

using formats::CheckpointReader;
using inspect::TreeNode;

constexpr int kTextColumns = 48;  // width of the name and the pattern beside the map
constexpr int kMinMapColumns = 16;
constexpr int kMaxMapColumns = 64;
constexpr std::size_t kTickColumns = 8;
constexpr std::uint64_t kMaxPlanNbytes = std::uint64_t{256} << 20;

// One line of the map: a tensor or an alias, or several tensors (or aliases) of layers that are cut
// in the same way.
struct Row {
  std::string name;
  std::size_t tensor = 0;
  std::string target{};  // of an alias; empty for a tensor
};

void append_rows(const TreeNode& node, const std::string& prefix, std::vector<Row>& rows) {
  const std::string name = prefix.empty() ? node.label : prefix + "." + node.label;
  if (node.kind == TreeNode::Kind::tensor) rows.push_back({name, node.index});
  if (node.kind == TreeNode::Kind::alias) rows.push_back({name, 0, node.target});
  for (const TreeNode& child : node.children) append_rows(child, name, rows);
}

// The contents to draw: a checkpoint, or its embedding tables as a plan lays them out.
struct Subject {
  const formats::CheckpointContents& contents;
  std::string format;  // of the checkpoint
  std::string origin;  // text for the last line: where the layout is from
  const std::map<std::string, TableSharding>* planned = nullptr;  // of each tensor; null: no plan
  const formats::MeshSource* meshes = nullptr;                    // null if meshes are not shown

  std::optional<formats::TensorMesh> mesh_of(std::size_t tensor) const {
    return meshes == nullptr ? std::nullopt : meshes->mesh_of(tensor);
  }
};

std::string comma_list(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

// Returns the axes of a mesh with their sizes: `dp 2, tp 4`.
std::string axes_in_words(const formats::TensorMesh& mesh) {
  std::vector<std::string> words;
  for (std::size_t axis = 0; axis < mesh.sizes.size(); ++axis) {
    const std::string name = mesh.axes.empty() ? std::string() : printable(mesh.axes[axis]) + " ";
    words.push_back(name + std::to_string(mesh.sizes[axis]));
  }
  return comma_list(words);
}

// Returns a list of ranks in words: `0, 2`, or `0 to 7` for many consecutive ranks.
std::string ranks_in_words(const std::vector<int>& ranks) {
  constexpr std::size_t kMaxListed = 4;
  const bool are_consecutive = ranks.back() - ranks.front() == static_cast<int>(ranks.size()) - 1;
  if (ranks.size() > kMaxListed && are_consecutive && std::ranges::is_sorted(ranks)) {
    return std::to_string(ranks.front()) + " to " + std::to_string(ranks.back());
  }
  std::vector<std::string> words;
  for (const int rank : ranks) words.push_back(std::to_string(rank));
  return comma_list(words);
}

// Returns the ranks at each place of a mesh: `0, 1 at [0]; 2, 3 at [1]`. Several ranks have the
// same place if they are in several meshes of the same shape.
std::string places_in_words(const std::vector<std::pair<Shape, int>>& places) {
  std::string text;
  for (std::size_t i = 0; i < places.size();) {
    const Shape& place = places[i].first;
    std::vector<int> ranks;
    for (; i < places.size() && places[i].first == place; ++i) ranks.push_back(places[i].second);
    text += (text.empty() ? "" : "; ") + ranks_in_words(ranks) + " at " + shape_to_string(place);
  }
  return text;
}

// Returns a mesh's ranks as PyTorch prints them: `[[0, 1], [2, 3]]`, or by place if places repeat.
std::string mesh_in_words(const formats::TensorMesh& mesh) {
  std::vector<std::pair<Shape, int>> places;  // in row-major order
  for (const auto& [rank, place] : mesh.coordinates) places.emplace_back(place, rank);
  std::ranges::sort(places);
  const auto is_twice = std::ranges::adjacent_find(
      places, {}, [](const std::pair<Shape, int>& place) -> const Shape& { return place.first; });
  if (is_twice != places.end()) return places_in_words(places);
  const auto same_row = [](const Shape& a, const Shape& b) {
    return std::equal(a.begin(), a.end() - 1, b.begin(), b.end() - 1);
  };
  std::string text;
  for (std::size_t i = 0; i < places.size();) {
    const Shape& first = places[i].first;
    std::size_t num_new = mesh.sizes.size();  // how many brackets to open
    if (i > 0) {
      const Shape& last = places[i - 1].first;
      const auto differ = std::ranges::mismatch(first, last).in1;
      num_new -= static_cast<std::size_t>(differ - first.begin()) + 1;
      text += std::string(num_new, ']') + ", ";
    }
    text += std::string(num_new, '[');
    std::vector<int> ranks;
    for (; i < places.size() && same_row(places[i].first, first); ++i) {
      ranks.push_back(places[i].second);
    }
    text += ranks_in_words(ranks);
  }
  return text + std::string(mesh.sizes.size(), ']');
}

// Returns the placements of a DTensor and its mesh: `Shard(0), Replicate on dp 2, tp 4`.
std::string placements_in_words(const formats::TensorMesh& mesh) {
  return comma_list(mesh.placements) + " on " + axes_in_words(mesh);
}

std::optional<TableSharding> sharding_of(const formats::TensorEntry& tensor,
                                         const Subject& subject) {
  if (subject.planned == nullptr) return inspect::table_sharding(tensor);
  return subject.planned->at(tensor.meta.fqn);
}

// Returns how the tensor is cut, and an embedding table's sharding type: `dim 0 / 4, row_wise`.
std::string cut_in_words(const formats::TensorEntry& tensor, const inspect::LayoutPattern& pattern,
                         const Subject& subject) {
  std::string text = inspect::layout_pattern_to_string(pattern);
  if (const auto sharding = sharding_of(tensor, subject)) {
    text.append(", ").append(table_sharding_name(*sharding));
  }
  return text;
}

// Returns the rank numbers above the columns of the map: `0123`, or `0       8       16`.
std::string axis(std::size_t world_size, std::size_t ranks_per_column) {
  const std::size_t num_columns = (world_size + ranks_per_column - 1) / ranks_per_column;
  const std::size_t tick_columns = world_size <= 10 ? 1 : kTickColumns;
  std::string text;
  for (std::size_t column = 0; column < num_columns; column += tick_columns) {
    const std::string label = std::to_string(column * ranks_per_column);
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

RankTotals totals_by_rank(const formats::CheckpointContents& contents,
                          const inspect::Selection& selection) {
  const auto world_size = static_cast<std::size_t>(contents.world_size);
  RankTotals totals{std::vector<std::int64_t>(world_size), std::vector<std::int64_t>(world_size)};
  for (std::size_t t : selection.tensors) {
    const formats::TensorEntry& tensor = contents.tensors[t];
    for (const formats::Piece& piece : tensor.pieces) {
      const auto rank = static_cast<std::size_t>(piece.rank);
      if (piece.rank < 0 || rank >= world_size) continue;
      ++totals.num_pieces[rank];
      totals.nbytes[rank] += static_cast<std::int64_t>(nbytes_of(piece.region, tensor.meta.dtype));
    }
  }
  return totals;
}

void print_map(const Subject& subject, const inspect::Selection& selection,
               const LayoutOptions& options, Terminal& terminal) {
  const formats::CheckpointContents& contents = subject.contents;
  std::vector<Row> rows;
  const inspect::Folding folding{.tensors = options.all
                                                ? inspect::Folding::Tensors::none
                                                : inspect::Folding::Tensors::of_equal_pieces,
                                 .meshes = subject.meshes};
  const TreeNode root = make_tree(contents, selection, folding);
  for (const TreeNode& node : root.children) append_rows(node, "", rows);

  const auto world_size = static_cast<std::size_t>(contents.world_size);
  const auto map_width = static_cast<std::size_t>(
      std::clamp(terminal.width() - kTextColumns, kMinMapColumns, kMaxMapColumns));
  const std::size_t ranks_per_column = inspect::shares_per_character(world_size, map_width);
  using enum Table::Align;
  Table table({left, left, left, left});
  table.let_shrink(0);
  std::set<std::string> meshes;
  table.add_row({{"rank", Style::faint}, {axis(world_size, ranks_per_column), Style::faint}});
  for (const Row& row : rows) {
    if (!row.target.empty()) {
      table.add_row(
          {{printable(row.name, row.name.size() * 4)},
           {"= " + printable(row.target), Style::faint, Table::Cell::Extent::rest_of_line}});
      continue;
    }
    const formats::TensorEntry& tensor = contents.tensors[row.tensor];
    const inspect::LayoutPattern pattern = inspect::layout_pattern(tensor);
    const bool is_broken = pattern.cut == inspect::LayoutPattern::Cut::incomplete;
    std::vector<Table::Cell> cells = {
        {printable(row.name, row.name.size() * 4)},
        {inspect::draw_shares(inspect::numel_by_rank(tensor, contents.world_size), map_width)},
        {cut_in_words(tensor, pattern, subject), is_broken ? Style::bad : Style::plain}};
    if (const auto mesh = subject.mesh_of(row.tensor)) {
      cells.push_back({placements_in_words(*mesh)});
      meshes.insert("mesh " + axes_in_words(*mesh) + ": ranks " + mesh_in_words(*mesh));
    }
    table.add_row(std::span<const Table::Cell>(cells));
  }
  const RankTotals totals = totals_by_rank(contents, selection);
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
  std::string legend = "· nothing, ▁ few bytes, █ the most bytes in the row";
  if (ranks_per_column > 1) legend += "; one column is " + counted(ranks_per_column, "rank");
  terminal.print("\n" + terminal.styled(Style::faint, legend) + "\n");
  for (const std::string& mesh : meshes) terminal.print(mesh + "\n");
  terminal.print(terminal.styled(
                     Style::strong,
                     counts_in_words(selection.totals) + " in " +
                         counted(static_cast<std::uint64_t>(selection.totals.num_pieces), "piece") +
                         "; " + subject.origin) +
                 "\n");
}

void write_mesh(JsonOutput& json, const formats::TensorMesh& mesh) {
  json.key("mesh").begin_object().key("axes").begin_array();
  for (const std::string& axis : mesh.axes) json.value(axis);
  json.end_array().member("sizes", mesh.sizes).key("placements").begin_array();
  for (const std::string& placement : mesh.placements) json.value(placement);
  json.end_array().key("ranks").begin_array();
  for (const auto& [rank, place] : mesh.coordinates) {
    json.begin_object().member("rank", rank).member("coordinates", place).end_object();
  }
  json.end_array().end_object();
}

void print_json(const Subject& subject, const inspect::Selection& selection, Terminal& terminal) {
  const formats::CheckpointContents& contents = subject.contents;
  JsonOutput json(terminal, kInspectJsonSchema);
  write_source(json, subject.format, contents);
  json.member("world_size", contents.world_size).key("tensors").begin_array();
  for (std::size_t t : selection.tensors) {
    const formats::TensorEntry& tensor = contents.tensors[t];
    json.begin_object().member("name", tensor.meta.fqn);
    json.member("dtype", dtype_name(tensor.meta.dtype)).key("shape").value(tensor.meta.shape);
    json.member("layout", layout_pattern_to_string(inspect::layout_pattern(tensor)));
    if (const auto sharding = sharding_of(tensor, subject)) {
      json.member("sharding", table_sharding_name(*sharding));
    }
    if (const auto mesh = subject.mesh_of(t)) write_mesh(json, *mesh);
    json.key("pieces").begin_array();
    for (const formats::Piece& piece : tensor.pieces) {
      json.begin_object().member("rank", piece.rank).key("region");
      write_region(json, piece.region);
      json.end_object();
    }
    json.end_array().end_object();
  }
  json.end_array();
  write_aliases(json, contents, selection);
  json.key("ranks").begin_array();
  const RankTotals totals = totals_by_rank(contents, selection);
  for (std::size_t rank = 0; rank < totals.nbytes.size(); ++rank) {
    json.begin_object().member("rank", std::uint64_t{rank});
    json.member("pieces", totals.num_pieces[rank]).member("nbytes", totals.nbytes[rank]);
    json.end_object();
  }
  json.end_array();
  json.finish();
}

void print_layout(const Subject& subject, const inspect::Selection& selection,
                  const LayoutOptions& options, Terminal& terminal) {
  if (options.json) {
    print_json(subject, selection, terminal);
  } else {
    print_map(subject, selection, options, terminal);
  }
}

struct PlannedTables {
  formats::CheckpointContents contents{};  // the tables with the pieces that each rank holds
  std::map<std::string, TableSharding> shardings{};
};

// Returns the selected tables as the plan lays them out.
PlannedTables planned_tables(const CheckpointReader& reader, const inspect::Selection& selection,
                             const std::vector<reshard::TableName>& names, const TablePlan& plan) {
  PlannedTables planned;
  planned.contents.world_size = plan.world_size;
  const std::map<std::size_t, TableRule> rules = reshard::rules_by_tensor(names, plan);
  std::map<std::size_t, std::string> tables;  // by tensor
  for (const reshard::TableName& name : names) tables.emplace(name.tensor_index, name.table);
  for (const std::size_t t : selection.tensors) {
    const TensorMeta& meta = reader.contents().tensors[t].meta;
    const auto table = tables.find(t);
    if (table == tables.end() || meta.shape.size() != 2) continue;
    const auto rule = rules.find(t);
    if (rule == rules.end()) {
      throw Error::expected(ErrorKind::mismatch, {reader.path(), meta.fqn, {}}, "table plan",
                            "a rule for table " + table->second, "none");
    }
    formats::TensorEntry entry;
    entry.meta = meta;
    for (const Shard& shard : table_shards(rule->second, meta.shape, plan.world_size)) {
      for (const int rank : shard.ranks) entry.pieces.push_back({shard.region, rank});
    }
    planned.contents.tensors.push_back(std::move(entry));
    planned.shardings.emplace(meta.fqn, rule->second.sharding);
  }
  for (const std::size_t a : selection.aliases) {
    const formats::Alias& alias = reader.contents().aliases[a];
    if (planned.shardings.contains(alias.target)) planned.contents.aliases.push_back(alias);
  }
  return planned;
}

void check_that_tables_are_there(const CheckpointReader& reader,
                                 const std::vector<reshard::TableName>& names,
                                 const TablePlan& plan) {
  std::set<std::string> tables;
  for (const reshard::TableName& name : names) tables.insert(name.table);
  for (const auto& [name, rule] : plan.tables) {
    if (tables.contains(name)) continue;
    throw Error::expected(ErrorKind::mismatch, {reader.path(), name, {}}, "table plan",
                          "a table of this name in the checkpoint", "none");
  }
}

void print_planned_layout(const CheckpointReader& reader, const LayoutOptions& options,
                          Terminal& terminal) {
  const TablePlan plan =
      TablePlan::from_json(read_file(FileSystem::posix(), options.table_plan_path, kMaxPlanNbytes),
                           options.table_plan_path);
  const std::vector<reshard::TableName> names = reshard::table_names(reader.contents());
  check_that_tables_are_there(reader, names, plan);
  for (const auto& [first, other] : reshard::names_with_different_rules(names, plan)) {
    throw Error::expected(ErrorKind::mismatch, {reader.path(), other.fqn, {}}, "table plan",
                          reshard::one_rule_for_both(first, other), "two different rules");
  }
  const PlannedTables planned =
      planned_tables(reader, select_with_tensors_of_aliases(reader, options.source), names, plan);
  const std::string origin =
      "planned for " + counted(static_cast<std::uint64_t>(plan.world_size), "rank");
  print_layout({planned.contents, std::string(reader.format().name()), origin, &planned.shardings},
               inspect::select(planned.contents, NameSelection(), reader.path()), options,
               terminal);
}

// Throws if the format does not say how tensors were placed.
const formats::MeshSource& meshes_of(const CheckpointReader& reader) {
  if (const auto* meshes = dynamic_cast<const formats::MeshSource*>(&reader)) return *meshes;
  throw Error::expected(ErrorKind::unsupported, {.path = reader.path()}, "mesh of ranks",
                        "a checkpoint that records a mesh, as files of DTensors do",
                        format_in_words(reader) + ", which has pieces and ranks only");
}

}  // namespace

void add_layout_command(CommandLine& line, LayoutOptions& options, Terminal& terminal) {
  Command& command = line.add_command("layout", "Shows how much of each tensor each rank holds",
                                      [&] { return run_layout(options, terminal); });
  command.describe(
      "The end of a line says how the tensor is cut. `whole`: not at all. `dim 0 / 4`: along "
      "dimension 0 into 4 pieces. `flat / 4`: into 4 ranges of its elements in row-major order. "
      "`boxes / 4`: into 4 boxes. `× 2`: two ranks hold each piece. For embedding tables the "
      "sharding type follows. Layers that are cut in the same way share a line.");
  add_source_arguments(command, options.source);
  command.flag("--all", options.all, "Show equal layers one by one")
      .flag("--mesh", options.mesh,
            "Show the placements of DTensors, and the mesh of ranks that they are placed on")
      .option("--plan", "FILE", options.table_plan_path,
              "JSON file: a table plan; show the embedding tables as the plan shards them")
      .flag("--json", options.json, "Print JSON, with the region of every piece");
  add_flat_layout_option(command, options.source);
  add_as_dict_option(command, options.source.as_dict);
  add_recipe_options(command, options.source.recipe);
  command.example("layout step-1000 model", "Show which rank holds which parameters of the model");
}

ExitCode run_layout(const LayoutOptions& options, Terminal& terminal) {
  const auto* const reader = open_source(options.source, terminal);
  if (!options.table_plan_path.empty()) {
    print_planned_layout(*reader, options, terminal);
    require_sources_unchanged();
    return ExitCode::done;
  }
  Subject subject{reader->contents(), std::string(reader->format().name()),
                  format_in_words(*reader)};
  if (options.mesh) subject.meshes = &meshes_of(*reader);
  print_layout(subject, select_with_tensors_of_aliases(*reader, options.source), options, terminal);
  require_sources_unchanged();
  return ExitCode::done;
}

}  // namespace tessera::cli
