#include "layout/table_json.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "base/word_list.h"

namespace tessera {

Error TableJson::refusal(std::string_view rule, std::string_view expected,
                         std::string_view found) const {
  return Error::expected(ErrorKind::corruption, {.path = path_, .fqn = table_}, rule, expected,
                         found);
}

void TableJson::refuse_unknown_keys(const Value& object,
                                    std::initializer_list<std::string_view> known) const {
  const auto* dict = object.get_if<Value::Dict>();
  if (dict == nullptr) throw refusal(what_, "an object", type_name(object));
  for (const auto& [key, value] : *dict) {
    const auto* name = key.get_if<std::string>();
    if (name == nullptr || std::find(known.begin(), known.end(), *name) == known.end()) {
      throw refusal(what_, "one of the keys " + detail::choice_of(known), value_to_string(key));
    }
  }
}

const Value& TableJson::member(const Value& object, std::string_view key,
                               std::string_view expected) const {
  const Value* found = object.find(key);
  if (found == nullptr) throw refusal(key, expected, "nothing");
  return *found;
}

const Value::Dict& TableJson::tables(const Value& file) const {
  integer(member(file, "schema", "1"), "schema", 1, 1);
  const Value& tables = member(file, "tables", "an object of tables");
  const auto* dict = tables.get_if<Value::Dict>();
  if (dict == nullptr) throw refusal("tables", "an object", type_name(tables));
  return *dict;
}

std::int64_t TableJson::integer(const Value& value, std::string_view rule, std::int64_t low,
                                std::int64_t high) const {
  const auto* number = value.get_if<std::int64_t>();
  if (number == nullptr || *number < low || *number > high) {
    throw refusal(rule, "an integer from " + std::to_string(low) + " to " + std::to_string(high),
                  value_to_string(value));
  }
  return *number;
}

double TableJson::number_from_zero(const Value& value, std::string_view rule) const {
  const auto* whole = value.get_if<std::int64_t>();
  const auto* real = value.get_if<double>();
  const double number = whole ? static_cast<double>(*whole) : real ? *real : -1;
  if (!std::isfinite(number) || number < 0) {
    throw refusal(rule, "a number of 0 or more", value_to_string(value));
  }
  return number;
}

bool TableJson::truth(const Value& value, std::string_view rule) const {
  const auto* truth = value.get_if<bool>();
  if (truth == nullptr) throw refusal(rule, "true or false", value_to_string(value));
  return *truth;
}

TableSharding TableJson::sharding(const Value& value) const {
  const auto* name = value.get_if<std::string>();
  const auto known = name ? parse_table_sharding(*name) : std::nullopt;
  if (!known) throw refusal("sharding", table_sharding_names(), value_to_string(value));
  return *known;
}

const Value::List& TableJson::list(const Value& value, std::string_view rule,
                                   std::string_view expected) const {
  const auto* list = value.get_if<Value::List>();
  if (list == nullptr || list->empty()) throw refusal(rule, expected, value_to_string(value));
  return *list;
}

std::vector<int> TableJson::ranks(const Value& value, int world_size) const {
  std::vector<int> ranks;
  for (const Value& rank : list(value, "ranks", "a list of ranks")) {
    ranks.push_back(static_cast<int>(integer(rank, "ranks", 0, world_size - 1)));
  }
  if (std::set<int>(ranks.begin(), ranks.end()).size() != ranks.size()) {
    throw refusal("ranks", "each rank once", value_to_string(value));
  }
  return ranks;
}

}  // namespace tessera
