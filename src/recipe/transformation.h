#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "recipe/operation.h"
#include "recipe/rules.h"
#include "recipe/state_names.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::recipe {

/// A tensor of the result: made by a rule, or the same as in the source (kept).
struct Target {
  formats::TensorEntry entry;  // without pieces
  BlockTensor tensor;
  std::size_t rule = 0;  // the rule that makes it; 0: no rule, the tensor is kept
};

/// A value under its new name.
struct ValueTarget {
  formats::ValueEntry entry;
  std::vector<std::size_t> sources;  // indices of values of the source, which must be equal
};

/// Two tensors that must be equal, because the rule that makes `targets` drops one of them.
struct TargetRequirement {
  std::vector<std::string> targets;  // names of tensors or aliases
  std::size_t rule = 0;
  Requirement requirement;
};

/// The result of applying rules to a checkpoint.
struct Transformation {
  std::vector<Target> targets;  // sorted by name
  std::vector<formats::Alias> aliases;
  std::vector<ValueTarget> values;
  std::vector<TargetRequirement> requirements;
  std::vector<formats::Finding> problems;
  std::vector<RuleUse> uses;  // one per rule
  std::vector<std::string> dropped;
  std::uint64_t num_dropped_elements = 0;  // elements of dropped tensors, slices and paddings
  /// By old name, the new names of a tensor or alias: if a rule makes something from it, or if its
  /// name changes. An entry that is not here keeps its name, or is in `dropped`.
  std::unordered_map<std::string, std::vector<std::string>> new_names;
  /// For each tensor or alias that a rule names or that is renamed, by its name in the source: the
  /// names of the tensors made from it; none if it is dropped. Empty if the checkpoint has no
  /// optimizer.
  std::unordered_map<std::string_view, std::vector<std::string>> targets_of;
  /// The names of all parameters in an optimizer. Empty if the checkpoint has no optimizer.
  std::optional<StateNames> state_names;
};

/// Whether to fill `Transformation::new_names`, which a proof of a recipe does not need.
enum class NewNames { collect, leave_out };

/// Applies rules to a checkpoint, and returns the result. `sources` says where the elements of
/// `contents.tensors` come from: whole tensors, or the result of another transformation. `prefix`
/// is added before all names of the rules. Problems are returned in `problems`, not thrown.
Transformation transform(const Rules& rules, const formats::CheckpointContents& contents,
                         std::vector<BlockTensor> sources, const std::string& prefix,
                         NewNames new_names);

/// Returns the tensors of a checkpoint, each as one block.
std::vector<BlockTensor> whole_tensors_of(const formats::CheckpointContents& contents);

}  // namespace tessera::recipe
