#include "base/value_bits.h"

#include <algorithm>
#include <bit>
#include <cstdint>

namespace tessera::detail {
namespace {

bool have_equal_items(const Value::List& a, const Value::List& b) {
  return std::ranges::equal(a, b, have_equal_bits);
}

}  // namespace

bool have_equal_bits(const Value& a, const Value& b) {
  if (a.storage().index() != b.storage().index()) return false;
  if (const auto* real = a.get_if<double>()) {
    return std::bit_cast<std::uint64_t>(*real) == std::bit_cast<std::uint64_t>(*b.get_if<double>());
  }
  if (const auto* list = a.get_if<Value::List>()) {
    return have_equal_items(*list, *b.get_if<Value::List>());
  }
  if (const auto* tuple = a.get_if<Value::Tuple>()) {
    return have_equal_items(tuple->items, b.get_if<Value::Tuple>()->items);
  }
  if (const auto* set = a.get_if<Value::Set>()) {
    return have_equal_items(set->items, b.get_if<Value::Set>()->items);
  }
  if (const auto* dict = a.get_if<Value::Dict>()) {
    return std::ranges::equal(*dict, *b.get_if<Value::Dict>(), [](const auto& x, const auto& y) {
      return have_equal_bits(x.first, y.first) && have_equal_bits(x.second, y.second);
    });
  }
  return a == b;
}

}  // namespace tessera::detail
