#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "reshard/moved_names.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::arithmetic {

/// The `rule` of all findings about a combination.
inline constexpr const char* kCombineRule = "combine";

/// Returns a problem of a combination.
formats::Finding combine_problem(std::string fqn, std::string expected, std::string found,
                                 Remedy remedy = {});

/// The tensors and values of a source that are selected, by name; a tensor is also found by the
/// selected names of its aliases. If only such names of a tensor are selected, the first is its
/// name. Optimizer state is never selected.
class SelectedEntries {
 public:
  /// Takes the names that `selection.only` selects. Keeps no reference.
  SelectedEntries(const formats::CheckpointContents& contents,
                  const reshard::PlanOptions& selection);

  using Indices = std::map<std::string, std::size_t, std::less<>>;
  const Indices& tensors() const { return tensors_; }
  const Indices& values() const { return values_; }
  /// The aliases, by their names: the index of the tensor.
  const Indices& aliases() const { return aliases_; }
  /// Returns the index of a tensor, by its name or by the name of an alias.
  std::optional<std::size_t> find_tensor(std::string_view name) const;
  /// As find_tensor. For `per_rank.<rank>.<name>`, falls back to `<name>`, which is the tensor of
  /// all ranks that have none of their own.
  std::optional<std::size_t> find_tensor_of_rank(std::string_view name) const;
  std::optional<std::size_t> find_value(std::string_view name) const;

 private:
  Indices tensors_;  // each tensor once
  Indices aliases_;
  Indices values_;
};

/// Lists what prevents a sum of the sources: optimizer state, quantized weights, names that a
/// source lacks, other shapes or kinds of numbers, missing files. `entries[i]` is of `sources[i]`,
/// and `quantization_methods[i]` is as in WeightedReader.
std::vector<formats::Finding> match_sources(
    const std::vector<const formats::CheckpointReader*>& sources,
    const std::vector<SelectedEntries>& entries,
    const std::vector<std::string>& quantization_methods, const reshard::PlanOptions& selection);

/// Returns the problem that a source of a sum is a LoRA adapter (or LoHa, LoKr, VeRA): it has
/// matrices of layers, but not the layers' weights. A model that has both gets a note. Nothing if
/// the source has no such matrices.
std::optional<formats::Finding> find_adapter(const formats::CheckpointReader& source,
                                             const SelectedEntries& entries);

/// Lists the floating-point tensors whose dtype cannot be added up, such as float8_e4m3fnuz. Leaves
/// out codes, scales, … of quantized weights, because match_sources lists these.
std::vector<formats::Finding> find_floats_without_sum(const formats::CheckpointReader& source,
                                                      const SelectedEntries& entries);

}  // namespace tessera::arithmetic
