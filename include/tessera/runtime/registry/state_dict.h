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

/// A part of a tensor that this rank holds.
struct TensorPart {
  Region region;      // of the whole tensor
  at::Tensor tensor;  // the region's elements in its own row-major order, in any shape; contiguous
};

/// A tensor of a state dict: all of it, or what this rank holds of it.
struct StateTensor {
  DType dtype = DType::float32;
  Shape shape;                    // of the whole tensor, whatever is held here
  std::vector<TensorPart> parts;  // none where this rank holds nothing
  /// Who holds what, by ranks of the model's mesh, the same on all ranks. Empty: no rank is known
  /// to hold anything but all of it.
  std::vector<Shard> layout;
  formats::StateKind kind = formats::StateKind::plain;
  std::string parameter;  // key of the parameter that optimizer state belongs to
  /// The name that a parameter or buffer has in the module tree. A hook that puts the entry under
  /// another key leaves this as it is: the optimizer's state then follows. Empty: nothing is known.
  std::string module_fqn;

  /// All of a tensor. Shape: the tensor's own.
  static StateTensor whole(const at::Tensor& tensor);
  /// Says whether all elements are here, in one part.
  bool is_whole() const;
  /// Returns the tensor. Throws: Error(invalid_argument) naming `fqn` where this is but a part.
  at::Tensor tensor(const std::string& fqn) const;
};

/// The second name of a tied tensor.
struct StateAlias {
  std::string target;
};

/// What stands under a key.
using StateEntry = std::variant<StateTensor, Value, StateAlias>;

/// A state dict: tensors, other values and aliases by their flattened keys, in order of insertion.
/// A plain container; copies share their tensors' memory.
class StateDict {
 public:
  /// A key and its entry.
  struct Item {
    std::string fqn;
    StateEntry entry;
    formats::KeyPath key_path{};  // of the nested dict; empty: the fqn is one step
  };

  /// Replaces an entry of that name in its place, or adds one at the end.
  void set(std::string fqn, StateEntry entry, formats::KeyPath key_path = {});
  bool erase(const std::string& fqn);
  const StateEntry* find(const std::string& fqn) const;  // nullptr: none
  StateEntry* find(const std::string& fqn);
  /// Says whether there is an entry of that name, an alias too.
  bool contains(const std::string& fqn) const { return find(fqn) != nullptr; }
  /// Returns the whole tensor, of an alias its target's. Throws: Error(not_found);
  /// Error(invalid_argument) where it is a value, or only a part is here.
  at::Tensor tensor(const std::string& fqn) const;

  std::size_t size() const { return items_.size(); }
  bool empty() const { return items_.empty(); }
  auto begin() const { return items_.begin(); }
  auto end() const { return items_.end(); }
  auto begin() { return items_.begin(); }
  auto end() { return items_.end(); }

  /// The flat parameters that tensors lie in, with their parameters under the keys used here.
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
