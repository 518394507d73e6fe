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
std::string renames_to_write(const std::vector<RenamedNames>& found) {
  if (found.size() == 1) {
    return ".renames = {" + quoted(found.front().rename) + "} loads them under the model's names";
  }
  std::string text = "these renames load the tensors under the model's names:\n.renames = {";
  for (std::size_t i = 0; i < found.size(); ++i) {
    text += (i == 0 ? "" : ",\n") + quoted(found[i].rename);
  }
  return text + "}";
}

std::string first_component(const std::string& name) {
  return name.substr(0, name.find('.'));
}

}  // namespace

std::string line_of(const RenamedNames& found) {
  const std::string num_tensors = std::to_string(found.num_tensors);
  const std::string subject = num_tensors + (found.num_tensors == 1 ? " tensor" : " tensors");
  std::string line =
      "'" + found.rename.from + "' in the checkpoint, '" + found.rename.to +
      "' in the model: renamed? " + subject + (found.num_tensors == 1 ? " has" : " have") +
      " the first name in the checkpoint, and the second name, with the same shape, in the model";
  if (found.num_optimizer_problems > 0) {
    line += "; " + std::to_string(found.num_optimizer_problems) +
            " names of the optimizer (optim.*) differ in the same way";
  }
  return line;
}

std::vector<std::string> hints_for_load(const std::vector<Finding>& problems,
                                        const std::vector<RenamedNames>& renamed_names,
                                        const std::vector<std::string>& held,
                                        const LoadOptions& options) {
  std::vector<std::string> hints;
  if (!renamed_names.empty()) {
    hints.push_back(renames_to_write(renamed_names) +
                    (options.renames.empty() ? "" : ", in addition to the given ones"));
  }
  if (has_state_by_number(problems, "optim.state.")) {
    hints.push_back(
        "the checkpoint has numbers instead of parameter names, as from an optimizer's own "
        "state_dict(): save it with get_state_dict, or load only the model, .only = {\"model.*\"}");
    return hints;
  }
  const bool is_only_more = std::ranges::all_of(problems, [&](const Finding& problem) {
    return problem.rule == "unexpected" &&
           std::ranges::find(held, first_component(problem.where.fqn)) == held.end();
  });
  if (options.only.empty() && is_only_more) {
    std::string patterns;
    for (const std::string& name : held) {
      patterns += (patterns.empty() ? "\"" : ", \"") + name + "\"";
    }
    hints.push_back(".only = {" + patterns + "} loads only what this TrainState has");
  }
  return hints;
}

bool has_state_by_number(const std::vector<Finding>& problems, const std::string& prefix) {
  return std::ranges::any_of(names_of(problems, "unexpected"), [&](const std::string& name) {
    if (!name.starts_with(prefix)) return false;
    const std::string rest = name.substr(prefix.size());
    const std::size_t end = rest.find_first_not_of("0123456789");
    return end != 0 && end != std::string::npos && rest[end] == '.' &&
           rest.find('.', end + 1) == std::string::npos;
  });
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
