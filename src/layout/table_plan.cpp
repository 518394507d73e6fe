#include "tessera/layout/table_plan.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <utility>

#include "base/json.h"
#include "layout/cut.h"
#include "layout/table_json.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

constexpr std::array<std::pair<std::string_view, TableSharding>, 7> kShardingNames{{
    {"data_parallel", TableSharding::data_parallel},
    {"table_wise", TableSharding::table_wise},
    {"column_wise", TableSharding::column_wise},
    {"row_wise", TableSharding::row_wise},
    {"table_row_wise", TableSharding::table_row_wise},
    {"table_column_wise", TableSharding::table_column_wise},
    {"grid", TableSharding::grid},
}};

/// Reads the rule of the current table of `json`.
TableRule read_rule(const TableJson& json, const Value& object, int world_size) {
  json.refuse_unknown_keys(object, {"sharding", "ranks", "column_shards"});
  TableRule rule;
  rule.sharding = json.sharding(json.member(object, "sharding", "a sharding type"));
  if (rule.sharding != TableSharding::grid && object.find("column_shards") != nullptr) {
    throw json.refusal("column_shards", "no column_shards, which only a grid has",
                       value_to_string(*object.find("column_shards")));
  }
  if (rule.sharding == TableSharding::data_parallel) {
    rule.ranks.resize(static_cast<std::size_t>(world_size));
    std::iota(rule.ranks.begin(), rule.ranks.end(), 0);
    if (const Value* ranks = object.find("ranks")) {
      if (json.ranks(*ranks, world_size).size() != rule.ranks.size()) {
        throw json.refusal("ranks of a data_parallel table", "all ranks, or no key 'ranks'",
                           value_to_string(*ranks));
      }
    }
    return rule;
  }
  rule.ranks = json.ranks(json.member(object, "ranks", "a list of ranks"), world_size);
  if (rule.sharding == TableSharding::grid) {
    rule.num_column_shards = static_cast<int>(
        json.integer(json.member(object, "column_shards", "a number of column shards"),
                     "column_shards", 1, static_cast<std::int64_t>(rule.ranks.size())));
  }
  if (const auto problem = problem_of(rule, world_size)) {
    throw json.refusal(problem->what, problem->expected, problem->found);
  }
  return rule;
}

std::string rule_to_json(const TableRule& rule) {
  std::string text = "{\"sharding\": " + json_quote(table_sharding_name(rule.sharding));
  if (rule.sharding != TableSharding::data_parallel) {
    const Value ranks(Value::List(rule.ranks.begin(), rule.ranks.end()));
    text += ", \"ranks\": " + value_to_json(ranks);
  }
  if (rule.sharding == TableSharding::grid) {
    text += ", \"column_shards\": " + std::to_string(rule.num_column_shards);
  }
  return text + "}";
}

Shard table_shard(FlatRange rows, FlatRange columns, int rank) {
  return {Box{{rows.begin, columns.begin}, {rows.numel(), columns.numel()}}, {rank}};
}

}  // namespace

std::optional<RuleProblem> problem_of(const TableRule& rule, int world_size) {
  if (rule.sharding == TableSharding::data_parallel) return std::nullopt;  // uses all ranks
  const auto num_ranks = static_cast<int>(rule.ranks.size());
  if (num_ranks == 0) return RuleProblem{"ranks", "one or more", "none"};
  std::set<int> seen;
  for (const int rank : rule.ranks) {
    if (rank < 0 || rank >= world_size) {
      return RuleProblem{"rank", "0 to " + std::to_string(world_size - 1), std::to_string(rank)};
    }
    if (!seen.insert(rank).second) {
      return RuleProblem{"ranks", "each rank once", std::to_string(rank) + " twice"};
    }
  }
  if (rule.sharding == TableSharding::table_wise && num_ranks != 1) {
    return RuleProblem{"ranks of a table_wise table", "1 rank", std::to_string(num_ranks)};
  }
  if (rule.sharding == TableSharding::grid &&
      (rule.num_column_shards < 1 || num_ranks % rule.num_column_shards != 0)) {
    return RuleProblem{"column_shards", "a divisor of the " + std::to_string(num_ranks) + " ranks",
                       std::to_string(rule.num_column_shards)};
  }
  return std::nullopt;
}

std::string_view table_sharding_name(TableSharding sharding) {
  for (const auto& [name, value] : kShardingNames) {
    if (value == sharding) return name;
  }
  TESSERA_CHECK(false && "unnamed TableSharding");
  return {};
}

std::optional<TableSharding> parse_table_sharding(std::string_view name) {
  for (const auto& [known, value] : kShardingNames) {
    if (known == name) return value;
  }
  return std::nullopt;
}

std::string table_sharding_names() {
  std::string names;
  for (const auto& [name, value] : kShardingNames) {
    names.append(names.empty() ? "" : ", ").append(name);
  }
  return names;
}

TablePlan TablePlan::from_json(std::string_view text, const std::string& path) {
  TableJson json(path, "plan");
  const Value file = parse_json(text, path);
  json.refuse_unknown_keys(file, {"schema", "world_size", "tables"});
  const Value::Dict& tables = json.tables(file);
  TablePlan plan;
  plan.world_size = static_cast<int>(json.integer(
      json.member(file, "world_size", "a number of ranks"), "world_size", 1, kMaxWorldSize));
  for (const auto& [name, rule] : tables) {
    const std::string& table = *name.get_if<std::string>();
    json.at_table(table);
    plan.tables[table] = read_rule(json, rule, plan.world_size);
  }
  return plan;
}

std::string TablePlan::to_json() const {
  // Written by hand, because value_to_json does not write every table name as a plain key.
  std::string text =
      "{\n  \"schema\": 1,\n  \"world_size\": " + std::to_string(world_size) + ",\n  \"tables\": {";
  const char* separator = "\n    ";
  for (const auto& [name, rule] : tables) {
    text += separator + json_quote(name) + ": " + rule_to_json(rule);
    separator = ",\n    ";
  }
  return text + (tables.empty() ? "}\n}\n" : "\n  }\n}\n");
}

std::optional<std::string> table_of_weight(std::string_view fqn) {
  constexpr std::string_view kSuffix = ".weight";
  if (!fqn.ends_with(kSuffix)) return std::nullopt;
  fqn.remove_suffix(kSuffix.size());
  for (std::string_view parent : {"embedding_bags.", "embeddings."}) {
    const std::size_t at = fqn.rfind(parent);
    if (at == std::string_view::npos || (at != 0 && fqn[at - 1] != '.')) continue;
    const std::string_view table = fqn.substr(at + parent.size());
    if (!table.empty()) return std::string(table);
  }
  return std::nullopt;
}

std::vector<Shard> table_shards(const TableRule& rule, std::span<const std::int64_t> shape,
                                int world_size) {
  if (shape.size() != 2) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "embedding table", "2 dimensions",
                          shape_to_string(shape));
  }
  if (rule.sharding == TableSharding::data_parallel || numel_of(shape) == 0) {
    return shards_of({Strategy::Sharding::replicated, world_size, 1}, shape);
  }
  const int num_ranks = static_cast<int>(rule.ranks.size());
  int num_column_shards = 1;
  if (rule.sharding == TableSharding::column_wise ||
      rule.sharding == TableSharding::table_column_wise) {
    num_column_shards = num_ranks;
  } else if (rule.sharding == TableSharding::grid) {
    num_column_shards = rule.num_column_shards;
  }
  const int num_row_shards = num_ranks / num_column_shards;
  std::vector<Shard> shards;
  for (int i = 0; i < num_ranks; ++i) {
    const FlatRange columns = chunk_of(shape[1], i / num_row_shards, num_column_shards);
    const FlatRange rows = chunk_of(shape[0], i % num_row_shards, num_row_shards);
    if (rows.numel() == 0 || columns.numel() == 0) continue;
    shards.push_back(table_shard(rows, columns, rule.ranks[static_cast<std::size_t>(i)]));
  }
  return shards;
}

}  // namespace tessera
