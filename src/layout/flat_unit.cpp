#include "tessera/layout/flat_unit.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/checked_math.h"
#include "base/json.h"
#include "tessera/base/error.h"

namespace tessera {

FlatUnit make_flat_unit(std::string name, DType dtype,
                        std::vector<std::pair<std::string, Shape>> parameters) {
  FlatUnit unit{std::move(name), dtype, {}};
  std::int64_t offset = 0;
  for (auto& [fqn, shape] : parameters) {
    const std::int64_t numel = numel_of(shape);
    unit.parameters.push_back({std::move(fqn), std::move(shape), offset});
    offset += numel;
  }
  return unit;
}

std::int64_t unpadded_numel(const FlatUnit& unit) {
  if (unit.parameters.empty()) return 0;
  const FlatUnitParameter& last = unit.parameters.back();
  return last.offset + numel_of(last.shape);
}

std::int64_t sharded_numel(const FlatUnit& unit, int world_size) {
  TESSERA_CHECK(world_size > 0);
  return ceil_div<std::int64_t>(unpadded_numel(unit), world_size);
}

FlatRange shard_of_parameter(const FlatUnit& unit, const FlatUnitParameter& parameter, int rank,
                             int world_size) {
  const std::int64_t share = sharded_numel(unit, world_size);
  const std::int64_t numel = numel_of(parameter.shape);
  const std::int64_t begin = std::clamp<std::int64_t>(rank * share - parameter.offset, 0, numel);
  const std::int64_t end =
      std::clamp<std::int64_t>((rank + 1) * share - parameter.offset, 0, numel);
  return begin < end ? FlatRange{begin, end} : FlatRange{};
}

namespace {

/// Reads members of JSON objects. Errors name the file and the place.
class UnitReader {
 public:
  explicit UnitReader(const std::string& path) : path_(path) {}

  template <class T>
  const T& member(const Value& object, std::string_view key, std::string_view expected,
                  const std::string& where) const {
    const Value* value = object.find(key);
    const T* typed = value == nullptr ? nullptr : value->get_if<T>();
    if (typed == nullptr) {
      throw refusal(where, key, expected, value == nullptr ? "nothing" : value_to_string(*value));
    }
    return *typed;
  }

  Error refusal(const std::string& where, std::string_view rule, std::string_view expected,
                std::string_view found) const {
    return Error::expected(ErrorKind::corruption, {.path = path_, .fqn = where}, rule, expected,
                           found);
  }

  Shape shape(const Value& parameter, const std::string& fqn) const {
    Shape sizes;
    for (const Value& size : member<Value::List>(parameter, "shape", "a list of sizes", fqn)) {
      const auto* number = size.get_if<std::int64_t>();
      if (number == nullptr) throw refusal(fqn, "shape", "integers", value_to_string(size));
      sizes.push_back(*number);
    }
    if (!checked_numel(sizes)) {
      throw refusal(fqn, "shape", "sizes of 0 or more, with a product below 2^63",
                    shape_to_string(sizes));
    }
    return sizes;
  }

 private:
  const std::string& path_;
};

}  // namespace

std::vector<FlatUnit> flat_units_from_json(std::string_view text, const std::string& path) {
  const UnitReader reader(path);
  const Value json = parse_json(text, path);
  if (reader.member<std::int64_t>(json, "schema", "1", "") != 1) {
    throw reader.refusal("", "schema", "1", value_to_string(*json.find("schema")));
  }
  std::vector<FlatUnit> units;
  std::set<std::string> seen;
  for (const Value& entry : reader.member<Value::List>(json, "units", "a list of units", "")) {
    const auto& name = reader.member<std::string>(entry, "name", "a string", "");
    const auto& dtype_text = reader.member<std::string>(entry, "dtype", "a dtype", name);
    const auto dtype = parse_dtype(dtype_text);
    if (!dtype) throw reader.refusal(name, "dtype", "a dtype of torch", dtype_text);
    std::vector<std::pair<std::string, Shape>> parameters;
    std::int64_t numel = 0;
    for (const Value& parameter :
         reader.member<Value::List>(entry, "parameters", "a list of parameters", name)) {
      const auto& fqn = reader.member<std::string>(parameter, "fqn", "a string", name);
      if (!seen.insert(fqn).second) {
        throw reader.refusal(fqn, "parameters", "each parameter once", "this one twice");
      }
      Shape shape = reader.shape(parameter, fqn);
      const auto sum = checked_add(numel, numel_of(shape));
      if (!sum) throw reader.refusal(name, "numel", "a sum below 2^63", "a larger sum");
      numel = *sum;
      parameters.emplace_back(fqn, std::move(shape));
    }
    units.push_back(make_flat_unit(name, *dtype, std::move(parameters)));
  }
  return units;
}

}  // namespace tessera
