#pragma once

#include <string_view>

namespace tessera::formats::deepspeed {

// Names that the reader and the writer of universal checkpoints share.

inline constexpr std::string_view kModelStates = "mp_rank_00_model_states.pt";
/// The name under which a run of ZeRO stage 3 looks for the model states.
inline constexpr std::string_view kModelStatesOfStage3 =
    "zero_pp_rank_0_mp_rank_00_model_states.pt";
/// The folder that Tessera's writer makes, beside `latest_universal`. `#`: a number.
inline constexpr std::string_view kUniversalFolder = "global_step#_universal";
inline constexpr std::string_view kLatestUniversal = "latest_universal";
/// The file with the user's rules for tensor parallelism, in the folder of a step.
inline constexpr std::string_view kRulesFile = "universal_checkpoint_info.json";
inline constexpr std::string_view kZero = "zero";
inline constexpr std::string_view kMemberSuffix = ".pt";  // of the files in the folder of a tensor
inline constexpr std::string_view kOptimizerState = "optimizer_state.pt";  // in `zero`
inline constexpr std::string_view kWeights = "fp32";                       // the file of weights

// [Note: What Tessera adds] DeepSpeed refuses a checkpoint without certain members. Under ZeRO
// stage 3, it also refuses a checkpoint without Adam's state. If the source that is converted lacks
// them, the writer adds neutral ones. The member `tessera` of optimizer_state.pt lists these, so
// that the reader can leave them out again. DeepSpeed ignores this member:
//
//     {"groups": [["up.weight", …], …],   names of the parameters in each group of the source; None
//                         for a group without a list `params`
//      "neutral": ["state", "model_states.global_steps", …],      names of what the writer added
//      "empty_dicts": [["optim", "state"], …], "empty_lists": …,  key paths of dicts and lists that
//                         are empty in the source (SGD's state). No other member can keep them
//      "paths": [["model", "up", "weight"], …],  key paths of the model and of its state that do
//                         not follow from names: with dicts within dicts, or lists
//      "order": ["model.up.weight", …]}  names of all entries, in the order of the source's dicts;
//                         missing if that is the order of names
inline constexpr std::string_view kTessera = "tessera";
inline constexpr std::string_view kGroups = "groups";
inline constexpr std::string_view kNeutral = "neutral";
inline constexpr std::string_view kEmptyDicts = "empty_dicts";
inline constexpr std::string_view kEmptyLists = "empty_lists";
inline constexpr std::string_view kPaths = "paths";
inline constexpr std::string_view kOrder = "order";
inline constexpr std::string_view kNeutralState = "state";
inline constexpr std::string_view kOfModelStates = "model_states.";
inline constexpr std::string_view kOfOptimizerState = "optimizer_state.";

}  // namespace tessera::formats::deepspeed
