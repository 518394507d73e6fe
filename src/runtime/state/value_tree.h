#pragma once

#include <map>
#include <optional>
#include <string>

#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::state {

/// How deep a value may be nested: every format gives it back then, within lists and dicts of ours.
inline constexpr int kMaxValueDepth = 60;

/// Throws: Error(unsupported) naming a value that is nested deeper.
void check_depth(const std::string& name, const Value& value);

/// Values by their place in a nested state dict, as checkpoints keep them: dicts flattened, each
/// leaf under its own key.
class ValueTree {
 public:
  struct Leaf {
    formats::KeyPath path;
    Value value;
  };

  /// Adds a value as it is. Throws: Error(invalid_argument) where another has its key.
  void add_leaf(formats::KeyPath path, Value value);
  /// Adds a value, of a dict with names for keys what is in it.
  void add(const formats::KeyPath& path, const Value& value);
  /// Adds a leaf of a checkpoint that was at `path`, under a name that may be a new one. Steps at
  /// the end that are spelled as before stay; dots of the rest are steps, and digits numbers.
  void add_renamed(const std::string& new_name, const formats::KeyPath& path, Value value);

  /// Returns what stands at a path: a leaf, or the dict or list of what is below it.
  std::optional<Value> find(const formats::KeyPath& path) const;
  const std::map<std::string, Leaf>& leaves() const { return leaves_; }  // by key

 private:
  std::map<std::string, Leaf> leaves_;
};

}  // namespace tessera::state
