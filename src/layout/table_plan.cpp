#include "tessera/layout/table_plan.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <set>
#include <utility>

#include "layout/cut.h"
#include "tessera/base/error.h"
#include "tessera/base/json.h"

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

std::string_view sharding_name(TableSharding sharding) {
  for (const auto& [name, value] : kShardingNames) {
    if (value == sharding) return name;
  }
  TESSERA_CHECK(false && "unnamed TableSharding");
  return {};
}

/// Reads the parts of a plan, and names file and table in every refusal.
class PlanReader {
 public:
  explicit PlanReader(const std::string& path) : path_(path) {}

  Error refusal(std::string_view rule, std::string_view expected, std::string_view found) const {
    return Error::expected(ErrorKind::corruption, {.path = path_, .fqn = table_}, rule, expected,
                           found);
  }

  const Value& member(const Value& object, std::string_view key, std::string_view expected) const {
    const Value* found = object.find(key);
    if (found == nullptr) throw refusal(key, expected, "nothing");
    return *found;
  }

  int integer(const Value& value, std::string_view rule, int low, int high) const {
    const auto* number = value.get_if<std::int64_t>();
    if (number == nullptr || *number < low || *number > high) {
      throw refusal(rule, "an integer from " + std::to_string(low) + " to " + std::to_string(high),
                    value_to_string(value));
    }
    return static_cast<int>(*number);
  }

  void refuse_unknown_keys(const Value& object,
                           std::initializer_list<std::string_view> known) const {
    const auto* dict = object.get_if<Value::Dict>();
    if (dict == nullptr) throw refusal("plan", "an object", type_name(object));
    for (const auto& [key, value] : *dict) {
      const auto* name = key.get_if<std::string>();
      if (name == nullptr || std::find(known.begin(), known.end(), *name) == known.end()) {
        throw refusal("plan", "only known keys", value_to_string(key));
      }
    }
  }

  TableRule rule(const std::string& table, const Value& json, int world_size) {
    table_ = table;
    refuse_unknown_keys(json, {"sharding", "ranks", "column_shards"});
    TableRule rule;
    const Value& sharding = member(json, "sharding", "a sharding type");
    const auto* name = sharding.get_if<std::string>();
    const auto known =
        std::find_if(kShardingNames.begin(), kShardingNames.end(),
                     [&](const auto& entry) { return name && entry.first == *name; });
    if (known == kShardingNames.end()) {
      std::string names;
      for (const auto& entry : kShardingNames) {
        names += (names.empty() ? "" : ", ") + std::string(entry.first);
      }
      throw refusal("sharding", names, value_to_string(sharding));
    }
    rule.sharding = known->second;

    if (rule.sharding == TableSharding::data_parallel) {
      rule.ranks.resize(static_cast<std::size_t>(world_size));
      std::iota(rule.ranks.begin(), rule.ranks.end(), 0);
    } else {
      const Value& ranks = member(json, "ranks", "a list of ranks");
      const auto* list = ranks.get_if<Value::List>();
      if (list == nullptr || list->empty()) {
        throw refusal("ranks", "a list of ranks", value_to_string(ranks));
      }
      for (const Value& rank : *list) {
        rule.ranks.push_back(integer(rank, "ranks", 0, world_size - 1));
      }
      if (std::set<int>(rule.ranks.begin(), rule.ranks.end()).size() != rule.ranks.size()) {
        throw refusal("ranks", "each rank once", value_to_string(ranks));
      }
      if (rule.sharding == TableSharding::table_wise && rule.ranks.size() != 1) {
        throw refusal("ranks of a table_wise table", "1 rank", std::to_string(rule.ranks.size()));
      }
    }
    if (rule.sharding == TableSharding::grid) {
      const int num_ranks = static_cast<int>(rule.ranks.size());
      rule.num_column_shards = integer(member(json, "column_shards", "a number of column shards"),
                                       "column_shards", 1, num_ranks);
      if (num_ranks % rule.num_column_shards != 0) {
        throw refusal("column_shards", "a divisor of the " + std::to_string(num_ranks) + " ranks",
                      std::to_string(rule.num_column_shards));
      }
    }
    return rule;
  }

 private:
  const std::string& path_;
  std::string table_;
};

Shard table_shard(FlatRange rows, FlatRange columns, int rank) {
  return {Box{{rows.begin, columns.begin}, {rows.numel(), columns.numel()}}, {rank}};
}

}  // namespace

TablePlan TablePlan::from_json(std::string_view text, const std::string& path) {
  PlanReader reader(path);
  const Value json = parse_json(text, path);
  reader.refuse_unknown_keys(json, {"schema", "world_size", "tables"});
  reader.integer(reader.member(json, "schema", "1"), "schema", 1, 1);
  TablePlan plan;
  plan.world_size = reader.integer(reader.member(json, "world_size", "a number of ranks"),
                                   "world_size", 1, kMaxWorldSize);
  const Value& tables = reader.member(json, "tables", "an object of tables");
  const auto* dict = tables.get_if<Value::Dict>();
  if (dict == nullptr) throw reader.refusal("tables", "an object", type_name(tables));
  for (const auto& [name, rule] : *dict) {
    const std::string& table = *name.get_if<std::string>();
    plan.tables[table] = reader.rule(table, rule, plan.world_size);
  }
  return plan;
}

std::string TablePlan::to_json() const {
  Value::Dict table_objects;
  for (const auto& [name, rule] : tables) {
    Value::Dict object{{"sharding", std::string(sharding_name(rule.sharding))}};
    if (rule.sharding != TableSharding::data_parallel) {
      object.emplace_back("ranks", Value::List(rule.ranks.begin(), rule.ranks.end()));
    }
    if (rule.sharding == TableSharding::grid) {
      object.emplace_back("column_shards", rule.num_column_shards);
    }
    table_objects.emplace_back(name, std::move(object));
  }
  return value_to_json(
      Value::Dict{{"schema", 1}, {"world_size", world_size}, {"tables", std::move(table_objects)}},
      JsonStyle::indented);
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
