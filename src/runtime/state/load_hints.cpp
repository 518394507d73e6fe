#include "runtime/state/load_hints.h"

#include <algorithm>
#include <set>
#include <string_view>

namespace tessera::state {
namespace {

using formats::Finding;
using reshard::Rename;
using Names = std::set<std::string, std::less<>>;

Names names_of(const std::vector<Finding>& problems, std::string_view rule) {
  Names names;
  for (const Finding& problem : problems) {
    if (problem.rule == rule) names.insert(problem.where.fqn);
  }
  return names;
}

std::string quoted(const Rename& rename) {
  return "{\"" + rename.from + "\", \"" + rename.to + "\"}";
}

/// Returns the text of the option that renames the names in `found`, one line for each rename.
std::string renames_to_write(const std::vector<reshard::RenamedNames>& found) {
  if (found.size() == 1) {
    return ".renames = {" + quoted(found.front().rename) + "} loads them under the model's names";
  }
  std::string text = "these renames load the tensors under the model's names:\n.renames = {";
  for (std::size_t i = 0; i < found.size(); ++i) {
    text += (i == 0 ? "" : ",\n") + quoted(found[i].rename);
  }
  return text + "}";
}

}  // namespace

std::vector<std::string> texts_of(const reshard::LoadHints& hints,
                                  const std::vector<std::string>& held,
                                  const LoadOptions& options) {
  std::vector<std::string> texts;
  if (!hints.renames.empty()) {
    texts.push_back(renames_to_write(hints.renames) +
                    (options.renames.empty() ? "" : ", in addition to the given ones"));
  }
  if (!hints.numbered.empty()) {
    texts.push_back(
        "the checkpoint has numbers instead of parameter names, as from an optimizer's own "
        "state_dict(): save it with get_state_dict, or load only the model, .only = {\"model.*\"}");
  }
  if (hints.has_more) {
    std::string patterns;
    for (const std::string& name : held) {
      patterns += (patterns.empty() ? "\"" : ", \"") + name + "\"";
    }
    texts.push_back(".only = {" + patterns + "} loads only what this TrainState has");
  }
  if (hints.may_cast) texts.push_back(".allow_cast = true converts tensors to the model's dtypes");
  if (hints.nearest) {
    texts.push_back("the name in the checkpoint that is nearest to '" + hints.nearest->first +
                    "' is '" + hints.nearest->second + "'");
  }
  return texts;
}

std::vector<std::string> hints_for_hooks(const std::vector<Finding>& problems,
                                         const StateDict& own) {
  const Names missing = names_of(problems, "missing");
  const Names unexpected = names_of(problems, "unexpected");
  const auto is_own = [&](const std::string& name) { return own.contains(name); };
  if (std::ranges::all_of(missing, is_own) && std::ranges::none_of(unexpected, is_own)) return {};
  return {
      "a state dict post hook of the module renames or removes entries: the load needs a load pre "
      "hook that undoes this (registry::add_load_state_dict_pre_hook)"};
}

std::vector<std::string> hints_for_state_dict(const StateDict& state_dict,
                                              const torch::nn::Module& module,
                                              const LoadStateDictOptions& options) {
  if (options.rank0_only || !state_dict.empty() || mesh_of(module).rank() == 0) return {};
  return {
      "the state dict of this rank is empty: if it was made with rank0_only, load it with "
      "rank0_only"};
}

}  // namespace tessera::state
