#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/name_rules.h"
#include "tessera/base/shape.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::reshard {

/// A number of a parameter within a name: `0` of `optim.state.0.exp_avg`.
struct NumberPlace {
  std::size_t begin;         // where the number begins in the name
  std::size_t end;           // where the number ends in the name
  std::size_t key;           // index of the key in the path that has the number
  std::size_t begin_in_key;  // position of the number in that key, if it is a string

  std::string_view root(std::string_view name) const;    // `optim.`
  std::string_view number(std::string_view name) const;  // `0`
  std::string_view entry(std::string_view name) const;   // `exp_avg`; empty if nothing follows
  /// Returns whether the name is of the optimizer `optim.`, also as an entry of one rank:
  /// `per_rank.1.optim.state.0.exp_avg`.
  bool is_of(std::string_view name, std::string_view optimizer_root) const;
};

/// Returns the place of each number that follows `state` in a name, as in `optim.state.0.exp_avg`.
/// A position in a list does not count.
std::vector<NumberPlace> number_places(std::string_view name, const formats::KeyPath& path);

/// Returns `path` with `name` instead of the number at `place`.
formats::KeyPath path_with_name(formats::KeyPath path, const NumberPlace& place,
                                const std::string& name);

/// Returns where the text behind `front` begins in a name `<front>…` or `per_rank.<rank>.<front>…`;
/// npos for any other name.
std::size_t place_behind(std::string_view name, std::string_view front);

/// An optimizer whose state has numbers instead of names of parameters, as torch.optim writes it.
struct NumberedOptimizer {
  std::string root;  // part of the names before `state` and `param_groups`: `optim.`
  std::vector<std::vector<std::string>> groups;       // numbers, in the optimizer's order
  std::vector<std::vector<std::string>> param_names;  // as PyTorch stores them; empty: not stored
  std::vector<std::size_t> values;                    // indices of the values that list numbers
  std::map<std::string, Shape> shapes;  // shapes of pointwise state, by the parameter's number
  std::set<std::string> flat;           // numbers whose pointwise state is flat (Flat state, below)
  /// Numbers whose state may have another shape than the parameter, although its name is that of
  /// pointwise state: the group has settings of a low-rank optimizer such as GaLore (`rank`), or
  /// state of the number has different shapes.
  std::set<std::string> unsure;

  std::size_t num_params() const;
};

/// [Note: Flat state] FSDP1 keeps pointwise state as a vector of the parameter's elements, of which
/// each rank has a range. Returns whether a tensor is such a vector.
bool is_flat_state(const formats::TensorEntry& tensor);

/// Returns the one optimizer that has numbers in its `param_groups`. If there are several, `only`
/// must select the `param_groups` of one. Throws: Error(mismatch) if there is none, if several
/// remain, if a rank has lists of its own that are moved, or if state and groups contradict each
/// other; what `read_value` throws.
NumberedOptimizer find_numbered_optimizer(const formats::CheckpointReader& reader,
                                          const NameSelection& only);

/// An optimizer whose state has names of parameters.
struct NamedOptimizer {
  std::string root;                 // as in NumberedOptimizer
  std::vector<std::string> names;   // in the optimizer's order, one group after another
  std::vector<std::size_t> values;  // indices of the values that list names
};

/// Returns the one optimizer that has names in its `param_groups`. If there are several, `only`
/// must select the `param_groups` of one. Throws: Error(mismatch) if none has names, several
/// remain, or a rank has lists of its own that are moved; Error(unsupported) if it has fields per
/// parameter instead; what `read_value` throws.
NamedOptimizer find_named_optimizer(const formats::CheckpointReader& reader,
                                    const NameSelection& only);

/// Returns `value` with names instead of numbers. `value` is `param_groups`, or `params` of one
/// group.
Value params_with_names(Value value, const std::map<std::string, std::string>& names);

}  // namespace tessera::reshard
