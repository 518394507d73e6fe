#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/pickle/pickle_object.h"
#include "formats/pickle/unpickler.h"
#include "tessera/base/value.h"

namespace tessera::formats::pickle {

/// The globals that plain values are made of. Right: the type of Value that each becomes.
///
///     OrderedDict, defaultdict, Counter   Dict
///     set, frozenset                      Set
///     bytes, bytearray, _codecs.encode    Bytes
///     torch.Size                          Tuple
///     torch dtype, layout                 Symbol `torch.float32`, `torch.strided`
///     torch.device                        Symbol `device:cuda:3`
///     complex                             Symbol `complex:1.5,-2.0`
///     PosixPath                           str
///     NumPy scalars                       bool, int or float
///     io.BytesIO                          Bytes
///     objects of a class read as a dict   Dict
///     TorchScript's typed containers      what they contain
enum class ValueGlobal : std::uint32_t {
  ordered_dict = 0x100,
  default_dict,
  counter,
  set,
  frozen_set,
  byte_array,
  bytes,
  complex,
  codecs_encode,
  builtin_type,  // list, dict, int, …: allowed only as the factory of a defaultdict
  path,
  torch_size,
  torch_device,
  torch_dtype,
  torch_layout,      // torch.strided, …
  torch_get_layout,  // torch.serialization._get_layout('torch.strided')
  torch_typed,       // torch.jit._pickle: a list or dict with the types of its items
  numpy_scalar,
  numpy_dtype,
  bytes_io,
};

/// Returns the table of the globals in ValueGlobal, for an AllowList.
std::span<const AllowedGlobal> value_globals();

/// Returns which ValueGlobal `object` names; nothing if it names another global. Requires: `object`
/// is a global or a call of a global.
std::optional<ValueGlobal> value_global(Object object);

/// Whether `object` is a call of OrderedDict, defaultdict or Counter, as Python pickles it: all its
/// entries were added to the call, or are in the dict that is the only argument of a Counter.
bool is_dict_class(Object object);

/// Limits the total output of all walks over one graph that share this budget. It counts the
/// output, and keeps the path from the root to the present object. The limit is needed because
/// objects of a graph can be shared: a few hundred bytes can describe a tree of 10^18 leaves, or an
/// endless one. Not thread-safe.
class WalkBudget {
 public:
  static constexpr int kMaxDepth = 64;

  /// Allows 64 MiB plus 128 times the size of the graph's pickle, but at most 4 GiB.
  explicit WalkBudget(const ObjectGraph& graph);
  /// Allows 64 MiB plus 128 times `pickle_nbytes`, but at most 4 GiB.
  explicit WalkBudget(std::uint64_t pickle_nbytes);
  /// Throws Error(corruption) if the budget is used up.
  void spend(Object at, std::uint64_t nbytes);

  /// Says whether `object` is on the path.
  bool is_on_path(Object object) const;

  /// Remembers a foreign object that is read as a dict.
  void note_as_dict(Object object) { as_dicts_.insert(object.id()); }
  const std::set<std::uint32_t>& as_dicts() const { return as_dicts_; }  // ids

  /// Remembers that a value of the type `name` is read as a plainer type (frozenset as set).
  void note_plainer(std::string_view name) { plainer_.insert(name); }
  /// Returns the names that note_plainer got since the last call of this function. They are views
  /// of constants or of the graph.
  std::set<std::string_view> take_plainer() { return std::exchange(plainer_, {}); }

  /// Remembers the state (attributes that a program has set) of an OrderedDict or another class of
  /// dict in a value, because the value lacks the state.
  void note_state(Object state) { states_.push_back(state); }
  /// Returns the states that note_state got since the last call of this function.
  std::vector<Object> take_states() { return std::exchange(states_, {}); }

  /// Keeps `object` on the path as long as the Descent lives, while a walk is inside `object`.
  /// Throws: Error(corruption) if `object` is already on the path, or the path is longer than
  /// kMaxDepth.
  class Descent {
   public:
    Descent(WalkBudget& budget, Object object);
    ~Descent() { budget_.way_.pop_back(); }
    Descent(const Descent&) = delete;
    Descent& operator=(const Descent&) = delete;

   private:
    WalkBudget& budget_;
  };

 private:
  std::uint64_t left_;
  std::vector<std::uint32_t> way_;  // ids
  std::vector<Object> states_;
  std::set<std::uint32_t> as_dicts_;
  std::set<std::string_view> plainer_;
};

/// Returns `object` as a plain value. Throws: Error(corruption) for wrong arguments, more than
/// WalkBudget::kMaxDepth levels, a used-up budget, or an object that contains itself;
/// Error(unsupported) if that object is read as a dict, and for what is not a plain value.
Value to_value(Object object, WalkBudget& budget);

/// Throws Error(unsupported) saying that `object`, which is read as a dict, contains itself.
[[noreturn]] void refuse_reference_back(Object object);

/// Returns a dict's key as a value. Throws: as to_value; Error(corruption) for a list or dict, or a
/// tuple with one: Python cannot hash it. Accepts a set, because it may have been a frozenset.
Value to_key(Object object, WalkBudget& budget);

}  // namespace tessera::formats::pickle
