#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "tessera/base/file_system.h"
#include "tessera/base/name_rules.h"
#include "tessera/formats/checkpoint.h"

// A plain optimizer of PyTorch keeps its state under numbers: `optim.state.0.exp_avg`. DCP's
// get_optimizer_state_dict, FSDP2 and Tessera's runtime look for names:
// `optim.state.emb.weight.exp_avg`.
namespace tessera::reshard {

/// The value of OptimizerParams::names for names that Tessera finds in the checkpoint itself.
inline constexpr std::string_view kAutomaticParams = "auto";
/// The value of OptimizerParams::names for the opposite: numbers in place of names, as in
/// `optimizer.state_dict()`.
inline constexpr std::string_view kParamsAsNumbers = "numbers";

/// The names of an optimizer's parameters, as the user gives them.
struct OptimizerParams {
  /// JSON: a list of names in the optimizer's order; or kAutomaticParams, or kParamsAsNumbers.
  std::string names{};
  std::string path{};  // of the file that holds the list, for errors
};

/// Returns the names that an option gives: kAutomaticParams or kParamsAsNumbers itself, or the list
/// in the file whose path the option is.
/// Throws: Error(not_found, io); Error(corruption) if the file is too large.
OptimizerParams read_optimizer_params(const FileSystem& fs, const std::string& option);

/// Returns a reader that shows the same checkpoint, with names where an optimizer has numbers: in
/// the names of its state, and in the lists `params` of its `param_groups`. The new names decide
/// the kinds of the renamed tensors; recorded kinds (StateKind) are dropped.
///
/// The optimizer is the one whose `param_groups` hold numbers. If there are several such
/// optimizers, it is the one with the `param_groups` that `only` selects. Number k of all groups,
/// one group after another, gets name k of the list.
///
/// With kAutomaticParams, the names are `param_names` of the groups, if PyTorch has stored
/// `param_names`. Otherwise the names are those of floating-point tensors that are outside
/// optimizers and have the shapes of the state. If `only` selects enough of these tensors, the
/// others are ignored. The names are used only if there is exactly one way to choose the tensors.
/// If a file keeps the order of its state dict (CheckpointReader::dict_orders), and not only sorted
/// names, each group must follow that order; otherwise shapes alone must decide. The names become
/// relative to the model: `model.emb.weight` gives `emb.weight`.
///
/// With kParamsAsNumbers, the optimizer must have names in its `param_groups`. The name at place k
/// of the lists `params`, one group after another, becomes number k. Apply recipes before.
///
/// If tensors of the checkpoint can be the parameters, every name must be one of them, with the
/// shape of its pointwise state. If there are none, a note (opening_findings) says so.
/// Throws: Error(mismatch) if the checkpoint has no such optimizer or several, or if names do not
/// fit it; Error(corruption) if the list is not a list of names; what `read_value` throws.
std::unique_ptr<formats::CheckpointReader> name_optimizer_params(
    std::unique_ptr<formats::CheckpointReader> source, const OptimizerParams& params,
    const NameSelection& only = {});

/// Applies `name_optimizer_params`, then a recipe; with kParamsAsNumbers, first the recipe. If
/// `params` is null, applies only the recipe. `apply_recipe` may return its argument.
std::unique_ptr<formats::CheckpointReader> apply_params_and_recipe(
    std::unique_ptr<formats::CheckpointReader> source, const OptimizerParams* params,
    const NameSelection& only,
    const std::function<std::unique_ptr<formats::CheckpointReader>(
        std::unique_ptr<formats::CheckpointReader>)>& apply_recipe);

}  // namespace tessera::reshard
