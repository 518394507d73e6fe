#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/value.h"
#include "tessera/layout/table_plan.h"

namespace tessera {

/// Reads JSON files about tables. Its functions throw Error(corruption) naming file and table.
class TableJson {
 public:
  /// Keeps a reference to `path`, which must outlive this object. `what` names the content in
  /// errors that are not about one member, such as an unknown key.
  TableJson(const std::string& path, std::string what) : path_(path), what_(std::move(what)) {}

  /// Sets the table that later errors name.
  void at_table(std::string table) { table_ = std::move(table); }

  Error refusal(std::string_view rule, std::string_view expected, std::string_view found) const;
  void refuse_unknown_keys(const Value& object,
                           std::initializer_list<std::string_view> known) const;
  const Value& member(const Value& object, std::string_view key, std::string_view expected) const;
  /// Returns the member `tables` of a file of schema 1.
  const Value::Dict& tables(const Value& file) const;

  std::int64_t integer(const Value& value, std::string_view rule, std::int64_t low,
                       std::int64_t high) const;
  double number_from_zero(const Value& value, std::string_view rule) const;
  bool truth(const Value& value, std::string_view rule) const;
  TableSharding sharding(const Value& value) const;
  const Value::List& list(const Value& value, std::string_view rule,
                          std::string_view expected) const;
  std::vector<int> ranks(const Value& value, int world_size) const;

 private:
  const std::string& path_;
  std::string what_;
  std::string table_;
};

}  // namespace tessera
