#pragma once

#include <map>
#include <optional>
#include <string>

#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::state {

/// The maximum nesting of a value. Every format can store this depth, including the lists and dicts
/// that Tessera puts around the value.
inline constexpr int kMaxValueDepth = 60;

/// Throws: Error(unsupported) naming `name` if `value` is nested more deeply than kMaxValueDepth.
void check_depth(const std::string& name, const Value& value);

/// Parses JSON that a rank has sent. Allows deep JSON, because one level of a value may take three
/// levels of JSON.
Value parse_message(const std::string& text);

/// Values by their path in a nested state dict. As in checkpoints, dicts are flattened: each leaf
/// has a key of its own, such as `optim.param_groups.0.lr`.
class ValueTree {
 public:
  struct Leaf {
    formats::KeyPath path;
    Value value;
  };

  /// Adds a value as one leaf. Throws: Error(invalid_argument) if the tree has a leaf of the same
  /// key.
  void add_leaf(formats::KeyPath path, Value value);
  /// Adds a value; the items of a dict with string keys become leaves of their own.
  void add(const formats::KeyPath& path, const Value& value);
  /// Adds under the name `new_name` a leaf whose path in the checkpoint is `path`. If `new_name`
  /// ends with the last keys of `path`, these keys keep their types. The rest of `new_name` is
  /// split at its dots; a component of digits becomes a number.
  void add_renamed(const std::string& new_name, const formats::KeyPath& path, Value value);

  /// Returns the leaf at a path, or the dict or list of all leaves below it; nullopt if none.
  std::optional<Value> find(const formats::KeyPath& path) const;
  const std::map<std::string, Leaf>& leaves() const {
    return leaves_;
  }  // the key is the whole name

 private:
  std::map<std::string, Leaf> leaves_;
};

}  // namespace tessera::state
