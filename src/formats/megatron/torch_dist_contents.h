#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "formats/megatron/common_state.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::megatron {

/// What a torch_dist checkpoint consists of, made from the entries of any checkpoint whose weights
/// have Megatron's names.
struct TorchDistContents {
  CheckpointContents dcp{};         // the tensors and objects in the DCP files
  std::vector<Value> dcp_values{};  // parallel to `dcp.values`
  /// For each tensor in `dcp`: the number of the source tensor at each index of the stacked
  /// dimensions.
  std::map<std::string, std::map<std::vector<std::int64_t>, std::size_t>> sources{};
  CommonState common;  // `common.pt`
  /// Source tensors whose content goes into `common.pt`, so they are not in `dcp`.
  std::set<std::size_t> of_common{};
  std::set<std::size_t> steps{};  // tensors in `of_common` that are the step of a parameter
  /// Names of 16-bit weights of which `dcp` also has an fp32 copy, for the optimizer.
  std::set<std::string> widened{};
  /// Weights that get the fields of another parameter group (CommonState::regrouped).
  std::vector<std::string> regrouped{};
  /// The first weight of an expert if layers with experts are stacked, and the source does not say
  /// whether Megatron numbers them. Otherwise empty.
  std::vector<std::string> stacked_unasked{};
  /// The first weight whose layer keeps its number, although the copied `common.pt` says that
  /// layers are stacked. Otherwise empty.
  std::vector<std::string> numbered_unasked{};
};

/// The files of a torch_dist checkpoint that are copied, and whose they are.
struct CopiedFiles {
  std::string common{};     // the path of the `common.pt` to copy; empty: none
  bool has_config = false;  // `metadata.json` is copied
  /// Whether the source has these files beside it, and no recipe changed its names.
  bool keep_names = false;
};

/// Sorts the entries of `contents`. Weights are `model.<name>`. If there are no such names, all
/// tensors except optimizer state are weights. `optim.state.<name>.<kind>` and `optim.param_groups`
/// are the optimizer's. An entry for which Megatron has no place keeps its name; Megatron ignores
/// it. If a `common.pt` is copied, no value is changed. If the source is a torch_dist checkpoint,
/// no name is changed either. Otherwise the arguments in the copied file say whether layers are
/// stacked. docs/formats/megatron.md has the rules.
/// Requires: `values[i]` belongs to `contents.values[i]`.
/// Throws: what TorchDistNames throws; Error(unsupported) if no weight has a name of Megatron's,
/// one is of a kind that Megatron stores in parts (state-space layers, GroupedMLP), two tensors
/// would get one name, there are two optimizers, the optimizer has unequal steps or no state of a
/// weight, or layers to be stacked differ in which state they have or in its dtype. Error(io,
/// corruption, unsupported) if the arguments in the copied file cannot be read.
TorchDistContents sort_for_torch_dist(const CheckpointContents& contents,
                                      const std::vector<Value>& values,
                                      const std::string& destination, const CopiedFiles& copied);

}  // namespace tessera::formats::megatron
