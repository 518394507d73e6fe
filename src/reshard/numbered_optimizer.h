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
  std::size_t begin;         // in the name
  std::size_t end;           // in the name
  std::size_t key;           // which key of the path has the number
  std::size_t begin_in_key;  // of a string key

  std::string_view root(std::string_view name) const;    // `optim.`
  std::string_view number(std::string_view name) const;  // `0`
  std::string_view entry(std::string_view name) const;   // `exp_avg`; empty if nothing follows
};

/// Returns the place of each number that follows a component `state` of a name. A position in a
/// list does not count.
std::vector<NumberPlace> number_places(std::string_view name, const formats::KeyPath& path);

/// Returns the path with `name` in place of the number.
formats::KeyPath path_with_name(formats::KeyPath path, const NumberPlace& place,
                                const std::string& name);

/// An optimizer that numbers its parameters.
struct NumberedOptimizer {
  std::string root;  // what names have before `state` and `param_groups`: `optim.`
  std::vector<std::vector<std::string>> groups;       // numbers, in the optimizer's order
  std::vector<std::vector<std::string>> param_names;  // as PyTorch stores them; empty: not stored
  std::vector<std::size_t> values;                    // indices of the values that list numbers
  std::map<std::string, Shape> shapes;                // of pointwise state, by number
  std::set<std::string> flat;                         // numbers whose pointwise state is flat

  std::size_t num_params() const;
};

/// Whether a tensor of pointwise state is a vector of its parameter's elements, of which each rank
/// has a range, as FSDP1 keeps it. [Note: Flat state]
bool is_flat_state(const formats::TensorEntry& tensor);

/// Returns the one optimizer that has numbers in its `param_groups`. Of several, takes the one
/// whose `param_groups` are selected by `only`. Throws: Error(mismatch) if there is none or
/// several, or if state and groups contradict each other; what `read_value` throws.
NumberedOptimizer find_numbered_optimizer(const formats::CheckpointReader& reader,
                                          const NameSelection& only);

/// Returns the value of `param_groups`, or of `params` of one group, with names for numbers.
Value params_with_names(Value value, const std::map<std::string, std::string>& names);

}  // namespace tessera::reshard
