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

/// The value of OptimizerParams::names to let Tessera find the names in the checkpoint itself.
inline constexpr std::string_view kAutomaticParams = "auto";
/// The value of OptimizerParams::names for the opposite: Tessera replaces names by numbers, as in
/// `optimizer.state_dict()`.
inline constexpr std::string_view kParamsAsNumbers = "numbers";

/// The names of an optimizer's parameters, as the user gives them.
struct OptimizerParams {
  /// JSON: a list of names in the optimizer's order; or kAutomaticParams, or kParamsAsNumbers.
  std::string names{};
  std::string path{};  // of the file that holds the list, for errors
};

/// Returns the names for the text of an option: kAutomaticParams or kParamsAsNumbers as it is, or
/// the list in the file with this path. Does not parse the list.
/// Throws: Error(not_found, io); Error(corruption) if the file is too large.
OptimizerParams read_optimizer_params(const FileSystem& fs, const std::string& option);

/// Returns a reader that shows the same checkpoint, but has names where an optimizer has numbers:
/// in the names of the optimizer's state, and in the lists `params` of its `param_groups`. Drops
/// recorded kinds (StateKind) of the renamed tensors; their new names decide the kinds.
///
/// The optimizer is the one whose `param_groups` hold numbers. If there are several such
/// optimizers, it is the one with the `param_groups` that `only` selects. Number k of all groups,
/// one group after another, gets name k of the list.
///
/// With kAutomaticParams, the names are `param_names` of the groups, if PyTorch has stored
/// `param_names`. Otherwise the names are those of floating-point tensors that are outside
/// optimizers and have the shapes of the state. If `only` selects enough of these tensors, the
/// others are ignored. There must be exactly one way to choose the tensors. If the file keeps the
/// order of its state dict (CheckpointReader::dict_orders), and not only sorted names, the
/// parameters of each group must be in that order; otherwise, shapes alone must decide. The names
/// become relative to the model: `model.emb.weight` gives `emb.weight`.
///
/// With kParamsAsNumbers, the optimizer must have names in its `param_groups`. The name at place k
/// of the lists `params`, one group after another, becomes number k. Apply a recipe before this.
///
/// If the checkpoint has tensors that can be the parameters, every name must be one of them, with
/// the shape of its pointwise state. State of another shape, as GaLore and Amos have it, is
/// accepted if no other order of the names fits more state. If the checkpoint has no such tensors,
/// a note in `opening_findings` says so.
/// Throws: Error(mismatch) if the checkpoint has no such optimizer or several, or if names do not
/// fit it; Error(corruption) if the list is not a list of names; what `read_value` throws.
std::unique_ptr<formats::CheckpointReader> name_optimizer_params(
    std::unique_ptr<formats::CheckpointReader> source, const OptimizerParams& params,
    const NameSelection& only = {});

/// Applies `name_optimizer_params`, then a recipe; with kParamsAsNumbers, the recipe first. If
/// `params` is null, applies only the recipe. `apply_recipe` returns its argument without a recipe.
std::unique_ptr<formats::CheckpointReader> apply_params_and_recipe(
    std::unique_ptr<formats::CheckpointReader> source, const OptimizerParams* params,
    const NameSelection& only,
    const std::function<std::unique_ptr<formats::CheckpointReader>(
        std::unique_ptr<formats::CheckpointReader>)>& apply_recipe);

}  // namespace tessera::reshard
