#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "recipe/operation.h"
#include "recipe/rules.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::recipe {

/// A tensor that a recipe makes, or keeps.
struct Target {
  formats::TensorEntry entry;  // without pieces
  BlockTensor tensor;
  std::size_t rule = 0;  // 0: no rule names it
};

/// A value under its new name.
struct ValueTarget {
  formats::ValueEntry entry;
  std::vector<std::size_t> sources;  // values of the source, which must be equal
};

/// Two tensors that must be equal, because the rule that makes `target` merges them.
struct TargetRequirement {
  std::string target;
  std::size_t rule = 0;
  Requirement requirement;
};

/// What rules make of a checkpoint.
struct Transformation {
  std::vector<Target> targets;  // sorted by name
  std::vector<formats::Alias> aliases;
  std::vector<ValueTarget> values;
  std::vector<TargetRequirement> requirements;
  std::vector<formats::Finding> problems;
  std::vector<RuleUse> uses;  // parallel to the rules
  std::vector<std::string> dropped;
  std::uint64_t num_dropped_elements = 0;  // of dropped tensors, slices and paddings
  std::unordered_map<std::string, std::vector<std::string>>
      new_names;  // by old name; only tensors whose names change
  /// The parameters that a parameter becomes, by its index in the source; none if it is dropped.
  /// Empty if the checkpoint has no optimizer.
  std::unordered_map<std::size_t, std::vector<std::string>> targets_of;
};

/// Whether to collect `Transformation::new_names`. A proof does not need them.
enum class NewNames { collect, leave_out };

/// Applies rules. `sources` has the elements of `contents.tensors`: whole tensors, or the result of
/// another transformation. `prefix` comes before all names of the rules. Problems are in
/// `problems`, not thrown.
Transformation transform(const Rules& rules, const formats::CheckpointContents& contents,
                         std::vector<BlockTensor> sources, const std::string& prefix,
                         NewNames new_names);

/// Returns the tensors of a checkpoint, each as one block.
std::vector<BlockTensor> whole_tensors_of(const formats::CheckpointContents& contents);

}  // namespace tessera::recipe
