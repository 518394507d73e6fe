#pragma once

#include <map>
#include <optional>
#include <string>

#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::state {

/// The maximum nesting of values. Every format can store it, inside our own lists and dicts.
inline constexpr int kMaxValueDepth = 60;

/// Throws: Error(unsupported) naming `name` if `value` is nested more deeply than kMaxValueDepth.
void check_depth(const std::string& name, const Value& value);

/// Values by their path in a nested state dict, as in checkpoints: dicts are flattened, each leaf
/// has its own key.
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
  /// Adds, under `new_name`, the leaf that is at `path` in the checkpoint. The last keys of `path`
  /// with which `new_name` ends are kept, with their types. The rest of `new_name` is split at
  /// dots; a component of digits becomes a number.
  void add_renamed(const std::string& new_name, const formats::KeyPath& path, Value value);

  /// Returns the value at a path: a leaf, or the dict or list of all leaves below the path.
  std::optional<Value> find(const formats::KeyPath& path) const;
  const std::map<std::string, Leaf>& leaves() const { return leaves_; }  // by key

 private:
  std::map<std::string, Leaf> leaves_;
};

}  // namespace tessera::state
