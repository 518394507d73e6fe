#pragma once

#include <ATen/core/Tensor.h>

#include <list>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/base/shape.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/layout/flat_unit.h"
#include "tessera/layout/region.h"
#include "tessera/layout/strategy.h"

namespace tessera {

/// The elements of a shard that this rank holds.
struct LocalShard {
  Region region;      // of the whole tensor
  at::Tensor tensor;  // the region's elements, row-major in the region; any shape; contiguous
};

/// A tensor of a state dict: whole, or the shards that this rank holds.
struct StateTensor {
  DType dtype = DType::float32;
  Shape shape;                           // of the whole tensor
  std::vector<LocalShard> local_shards;  // empty if this rank holds nothing
  /// Which ranks hold which regions; equal on all ranks. Empty: every rank holds everything, or
  /// (LOCAL) unknown. Of copies that may differ (buffers), it lists only rank 0's, which is saved.
  std::vector<Shard> layout;
  formats::StateKind kind = formats::StateKind::plain;
  std::string parameter;  // of optimizer state: the key of its parameter; empty for other tensors
  /// The name of the parameter or buffer in the module tree; empty: unknown. A hook that renames
  /// the entry must not change `module_fqn`, because Tessera uses it to find the parameter's
  /// optimizer state and rename that too.
  std::string module_fqn;

  /// Returns an entry with all of `tensor`. Shares its memory; copies if it is not contiguous.
  static StateTensor whole(const at::Tensor& tensor);
  /// Returns whether this rank holds all elements, in one shard.
  bool is_whole() const;
  /// Returns the whole tensor, which shares memory with this entry. Throws: Error(invalid_argument)
  /// naming `fqn` if `is_whole()` is false.
  at::Tensor tensor(const std::string& fqn) const;
};

/// Another name of a tied tensor.
struct StateAlias {
  std::string target;  // the fqn of the entry that has the tensor
};

/// What a state dict holds under one key.
using StateEntry = std::variant<StateTensor, Value, StateAlias>;

/// A state dict: tensors, other values and aliases by their flattened keys, in order of insertion.
/// A plain container; copies share their tensors' memory. Not thread-safe.
class StateDict {
 public:
  /// A key and its entry.
  struct Item {
    std::string fqn;
    StateEntry entry;
    formats::KeyPath key_path{};  // in the nested dict; empty: the fqn is one key
  };

  /// Replaces the entry that is called `fqn`, or appends a new one.
  void set(std::string fqn, StateEntry entry, formats::KeyPath key_path = {});
  bool erase(const std::string& fqn);                    // returns whether there was an entry
  const StateEntry* find(const std::string& fqn) const;  // nullptr if there is none
  StateEntry* find(const std::string& fqn);
  /// Returns whether there is an entry of that name; aliases count.
  bool contains(const std::string& fqn) const { return find(fqn) != nullptr; }
  /// Returns the whole tensor; follows aliases. Throws: Error(not_found) if there is no entry;
  /// Error(invalid_argument) if the entry is a value, or not whole on this rank (`is_whole`).
  at::Tensor tensor(const std::string& fqn) const;

  std::size_t size() const { return items_.size(); }
  bool empty() const { return items_.empty(); }
  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }
  auto begin() { return items_.begin(); }
  auto end() { return items_.end(); }

  /// For type SHARDED: the flat parameters that hold the tensors, with keys of this dict as names.
  std::vector<FlatUnit> units;

 private:
  std::list<Item> items_;
  std::unordered_map<std::string, std::list<Item>::iterator> places_;

 public:
  StateDict() = default;
  StateDict(const StateDict& other);
  StateDict& operator=(const StateDict& other);
  StateDict(StateDict&&) = default;
  StateDict& operator=(StateDict&&) = default;
  ~StateDict() = default;
};

}  // namespace tessera
