#include "runtime/state/load_hints.h"

#include <algorithm>
#include <optional>
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

/// Returns what makes one name of the other by its front alone: the rest is as many whole steps as
/// they have in common. Nothing where that is none.
std::optional<Rename> front_of(std::string_view from, std::string_view to) {
  std::size_t num_common = 0;  // bytes, at the end
  for (std::size_t i = 1; i <= std::min(from.size(), to.size()); ++i) {
    if (from[from.size() - i] != to[to.size() - i]) break;
    const auto begins_step = [i](std::string_view name) {
      return i == name.size() || name[name.size() - i - 1] == '.';
    };
    if (begins_step(from) && begins_step(to)) num_common = i;
  }
  if (num_common == 0) return std::nullopt;
  from.remove_suffix(num_common);
  to.remove_suffix(num_common);
  return Rename{std::string(from), std::string(to)};
}

/// Returns the one rule that makes unexpected names of all names of the model that are missing.
std::optional<Rename> rename_that_fits(const std::vector<Finding>& problems) {
  Names missing = names_of(problems, "missing");
  std::erase_if(missing, [](const std::string& name) { return !name.starts_with("model."); });
  if (missing.empty()) return std::nullopt;
  const Names unexpected = names_of(problems, "unexpected");
  for (const std::string& name : unexpected) {
    const auto rename = front_of(name, *missing.begin());
    const auto is_found = [&](const std::string& wanted) {
      return wanted.starts_with(rename->to) &&
             unexpected.contains(rename->from + wanted.substr(rename->to.size()));
    };
    if (rename && std::ranges::all_of(missing, is_found)) return rename;
  }
  return std::nullopt;
}

std::string first_step(const std::string& name) {
  return name.substr(0, name.find('.'));
}

}  // namespace

std::vector<std::string> hints_for_load(const std::vector<Finding>& problems,
                                        const std::vector<std::string>& held,
                                        const LoadOptions& options) {
  std::vector<std::string> hints;
  if (options.renames.empty()) {
    if (const auto rename = rename_that_fits(problems)) {
      hints.push_back(".renames = {{\"" + rename->from + "\", \"" + rename->to +
                      "\"}} gives the model its names");
    }
  }
  if (has_state_by_number(problems, "optim.state.")) {
    hints.push_back(
        "an optimizer's own state_dict() has numbers in the place of names: save it by "
        "get_state_dict, or load without it, .only = {\"model.*\"}");
    return hints;
  }
  const bool is_only_more = std::ranges::all_of(problems, [&](const Finding& problem) {
    return problem.rule == "unexpected" &&
           std::ranges::find(held, first_step(problem.where.fqn)) == held.end();
  });
  if (options.only.empty() && is_only_more) {
    std::string patterns;
    for (const std::string& name : held) {
      patterns += (patterns.empty() ? "\"" : ", \"") + name + "\"";
    }
    hints.push_back(".only = {" + patterns + "} takes what this TrainState has, and no more");
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

std::vector<std::string> hints_for_state_dict(const StateDict& state_dict,
                                              const torch::nn::Module& module,
                                              const LoadStateDictOptions& options) {
  if (options.rank0_only || !state_dict.empty() || mesh_of(module).rank() == 0) return {};
  return {"this rank has no entries: what was made with rank0_only is loaded with rank0_only"};
}

}  // namespace tessera::state
