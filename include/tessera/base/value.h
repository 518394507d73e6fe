#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

/// Anything in a checkpoint that is not a tensor: a step counter, a hyperparameter, a string,
/// nested lists and dicts. It keeps what Python distinguishes (int and float, list and tuple, str
/// and bytes, the order and the key types of a dict), so that a value survives any conversion
/// between formats. Copies are deep. `==` compares types and order, also in a dict; NaN equals NaN.
class Value {
 public:
  /// Python's None.
  struct None {
    friend bool operator==(None, None) = default;
  };
  /// An integer beyond 64 bits, in decimal, with a leading `-` if negative.
  struct BigInt {
    std::string decimal;
    friend bool operator==(const BigInt&, const BigInt&) = default;
  };
  /// Bytes that are not text.
  struct Bytes {
    std::string data;
    friend bool operator==(const Bytes&, const Bytes&) = default;
  };
  /// A constant that is kept as its name: `torch.float32`, `torch.strided`. The name of a device is
  /// like `device:cpu`, that of a complex number like `complex:1.5,-2.0`.
  struct Symbol {
    std::string name;
    friend bool operator==(const Symbol&, const Symbol&) = default;
  };
  /// A list of any values.
  using List = std::vector<Value>;
  /// Like a list, but a tuple in Python.
  struct Tuple {
    std::vector<Value> items;
  };
  /// A Python set. No two items are equal.
  struct Set {
    std::vector<Value> items;  // in stored order
  };
  /// Entries in insertion order. Keys are hashable values, mostly str; no two are equal.
  using Dict = std::vector<std::pair<Value, Value>>;
  /// The types that a value can have.
  using Storage = std::variant<None, bool, std::int64_t, BigInt, double, std::string, Bytes, Symbol,
                               List, Tuple, Set, Dict>;

  Value() = default;
  Value(bool value) : storage_(value) {}
  Value(int value) : storage_(static_cast<std::int64_t>(value)) {}
  Value(std::int64_t value) : storage_(value) {}
  Value(double value) : storage_(value) {}
  Value(std::string value) : storage_(std::move(value)) {}
  Value(const char* value) : storage_(std::string(value)) {}
  Value(BigInt value) : storage_(std::move(value)) {}
  Value(Bytes value) : storage_(std::move(value)) {}
  Value(Symbol value) : storage_(std::move(value)) {}
  Value(List value) : storage_(std::move(value)) {}
  Value(Tuple value) : storage_(std::move(value)) {}
  Value(Set value) : storage_(std::move(value)) {}
  Value(Dict value) : storage_(std::move(value)) {}

  /// Returns the value for std::visit.
  const Storage& storage() const { return storage_; }
  Storage& storage() { return storage_; }

  /// Says whether the value is a T. Requires, here and below: T is one of the types in Storage.
  template <class T>
  bool is() const {
    return std::holds_alternative<T>(storage_);
  }
  /// Returns the value as a T, or nullptr if the value is not a T.
  template <class T>
  const T* get_if() const {
    return std::get_if<T>(&storage_);
  }
  template <class T>
  T* get_if() {
    return std::get_if<T>(&storage_);
  }

  /// Returns the value as a T. Throws: Error(mismatch) naming both types if the value is not a T.
  template <class T>
  const T& get() const {
    if (const T* const value = get_if<T>()) return *value;
    throw_is_not(Storage(std::in_place_type<T>));
  }

  /// Returns the value under a string key. Returns nullptr if this is no Dict, or lacks the key.
  const Value* find(std::string_view key) const;
  /// As `find`, but throws Error(not_found), with the existing keys, where `find` returns nullptr.
  const Value& at(std::string_view key) const;

  friend bool operator==(const Value& a, const Value& b);

 private:
  [[noreturn]] void throw_is_not(Storage expected) const;

  Storage storage_;
};

/// Returns the name of the value's type: `none`, `bool`, `int` (also for a BigInt), `float`, `str`,
/// `bytes`, `symbol`, `list`, `tuple`, `set` or `dict`.
std::string_view type_name(const Value& value);

/// Returns the value as Python would print it, on one line; cut at about `max_nbytes`, with a `…`.
std::string value_to_string(const Value& value, std::size_t max_nbytes = 200);

}  // namespace tessera
