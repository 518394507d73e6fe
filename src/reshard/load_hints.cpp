#include "reshard/load_hints.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/cast.h"
#include "formats/per_rank_rules.h"
#include "tessera/base/dtype.h"
#include "tessera/base/name_rules.h"

namespace tessera::reshard {
namespace {

using formats::Finding;

/// Returns whether a problem of the planner is that two floating-point dtypes differ.
bool is_cast_allowed_by_option(const Finding& problem) {
  if (problem.rule != "dtype") return false;
  const auto to = parse_dtype(problem.expected);
  const auto from = parse_dtype(problem.found);
  return to && from && is_floating_point(*to) && is_floating_point(*from) && can_cast(*from, *to);
}

/// Returns whether a name is state of a numbered parameter: `<prefix>0.exp_avg`.
bool is_state_by_number(const std::string& name, std::string_view prefix) {
  if (!name.starts_with(prefix)) return false;
  const std::string rest = name.substr(prefix.size());
  const std::size_t end = rest.find_first_not_of("0123456789");
  return end != 0 && end != std::string::npos && rest[end] == '.' &&
         rest.find('.', end + 1) == std::string::npos;
}

bool has_first_component(const std::string& name, const std::vector<std::string>& components) {
  return std::ranges::find(components, name.substr(0, name.find('.'))) != components.end();
}

/// Returns the only missing name in `problems`, and the unexpected name that is nearest to it.
std::optional<std::pair<std::string, std::string>> nearest_name(
    const std::vector<const Finding*>& problems) {
  const std::string* missing = nullptr;
  std::vector<std::string_view> unexpected;
  for (const Finding* const problem : problems) {
    if (problem->rule == "unexpected") unexpected.push_back(problem->where.fqn);
    if (problem->rule != "missing") continue;
    if (missing != nullptr) return std::nullopt;
    missing = &problem->where.fqn;
  }
  if (missing == nullptr) return std::nullopt;
  const auto nearest = closest_word(*missing, unexpected);
  if (!nearest) return std::nullopt;
  return std::pair(*missing, std::string(*nearest));
}

using RuleAndName = std::pair<std::string, std::string>;

std::set<RuleAndName> rules_and_names(const std::vector<Finding>& problems) {
  std::set<RuleAndName> found;
  for (const Finding& problem : problems) found.emplace(problem.rule, problem.where.fqn);
  return found;
}

/// Returns the problems of the load with `renames` in addition to its own.
std::vector<Finding> problems_with(const RefusedLoad& load, const std::vector<Rename>& renames) {
  LoadPlanOptions options = load.options;
  options.renames.insert(options.renames.end(), renames.begin(), renames.end());
  const auto found = rules_and_names(load.problems);
  // The caller wants only values that the checkpoint has: those that fit, and maybe others, which
  // it calls unexpected. Here they have their new names, and missing ones are wanted too.
  std::set<std::string> values;
  for (const formats::ValueEntry& value : load.wanted.values) {
    const bool is_unexpected = found.contains({"unexpected", value.name});
    values.insert(is_unexpected ? formats::name_after_renames(value.name, renames) : value.name);
  }
  for (const Finding& problem : load.problems) {
    if (problem.rule == "missing") values.insert(problem.where.fqn);
  }
  for (const formats::TensorEntry& tensor : load.wanted.tensors) values.erase(tensor.meta.fqn);
  for (const formats::Alias& alias : load.wanted.aliases) values.erase(alias.fqn);
  formats::CheckpointContents wanted = load.wanted;
  wanted.values.clear();
  for (const std::string& value : values) wanted.values.push_back({value, {}});
  return plan_load(load.source, load.source_path, wanted, load.rank, options).problems;
}

/// Tries renames, and sets what they fix in `hints`. Returns whether they only help: no name that
/// fits without them is missing or unexpected with them, or given twice.
bool try_renames(const RefusedLoad& load, const std::vector<Rename>& tried,
                 const ImpliedRenames& implied, LoadHints& hints) {
  std::vector<Rename> rules = tried;
  std::vector<std::size_t> parents;  // of the implied rules: the position in `tried`
  for (std::size_t i = 0; i < tried.size(); ++i) {
    for (Rename& each : implied.of(tried[i])) {
      rules.push_back(std::move(each));
      parents.push_back(i);
    }
  }
  std::vector<Finding> problems = problems_with(load, rules);
  const auto after = rules_and_names(problems);
  const auto before = rules_and_names(load.problems);
  std::erase_if(problems, [&](const Finding& problem) {
    return before.contains({problem.rule, problem.where.fqn});
  });
  const bool breaks_names = std::ranges::any_of(problems, [](const Finding& problem) {
    return problem.rule == "missing" || problem.rule == "unexpected" || problem.rule == "rename";
  });
  if (breaks_names) return false;

  hints.renames.clear();
  for (const Rename& rename : tried) hints.renames.push_back({rename});
  hints.is_renamed.assign(load.problems.size(), false);
  std::map<std::string, RenamedNames*> fixed;  // the rename of each new name that fits
  const auto is_taken = [&](const std::string& new_name) {
    return load.takes_any_state &&
           std::ranges::any_of(load.models_of_job, [&](const auto& optimizer_and_model) {
             const auto& [optimizer, model] = optimizer_and_model;
             return new_name.starts_with(optimizer) &&
                    fixed.contains(model + std::string(parameter_in_name(new_name, optimizer)));
           });
  };
  for (const bool are_implied : {false, true}) {  // parameters first, then their state
    for (std::size_t i = 0; i < load.problems.size(); ++i) {
      const std::string& fqn = load.problems[i].where.fqn;
      if (load.problems[i].rule != "unexpected") continue;
      const auto rule = std::ranges::find_if(
          rules, [&](const Rename& each) { return formats::fits_entry(each, fqn); });
      const auto position = static_cast<std::size_t>(rule - rules.begin());
      if (rule == rules.end() || (position >= tried.size()) != are_implied) continue;
      const std::string new_name = formats::name_after_renames(fqn, rules);
      if (after.contains({"unexpected", fqn}) && !(are_implied && is_taken(new_name))) continue;
      hints.is_renamed[i] = true;
      RenamedNames& parent =
          hints.renames[are_implied ? parents[position - tried.size()] : position];
      fixed.emplace(new_name, &parent);
      if (are_implied) {
        ++parent.num_optimizer_problems;
      } else if (!after.contains({"shape", new_name})) {
        ++parent.num_tensors;
      }
    }
  }
  for (std::size_t i = 0; i < load.problems.size(); ++i) {
    const std::string& fqn = load.problems[i].where.fqn;
    if (load.problems[i].rule != "missing") continue;
    hints.is_renamed[i] = !after.contains({"missing", fqn});
    for (const auto& [optimizer, model] : load.models_of_job) {
      const auto parameter = fixed.find(model + fqn);
      if (hints.is_renamed[i] || parameter == fixed.end()) continue;
      ++parameter->second->num_optimizer_problems;  // a parameter that no group has
      hints.is_renamed[i] = true;
    }
  }
  for (Finding& problem : problems) problem.where.path.clear();
  hints.after_renames = std::move(problems);
  return true;
}

/// Sets the renames of the hints, and what they fix.
void find_renames(const RefusedLoad& load, LoadHints& hints) {
  const ImpliedRenames implied(load.source, load.models_of_job);
  std::vector<Rename> tried =
      likely_renames(load.problems, load.source, load.wanted, load.options, implied);
  while (!tried.empty() && try_renames(load, tried, implied, hints)) {
    tried.clear();
    for (const RenamedNames& each : hints.renames) {
      if (each.num_tensors > 0) tried.push_back(each.rename);
    }
    if (tried.size() == hints.renames.size()) return;
  }
  hints.renames.clear();
  hints.is_renamed.assign(load.problems.size(), false);
  hints.after_renames.clear();
}

bool numbers_parameters(const formats::CheckpointContents& contents, const std::string& optimizer) {
  const std::string prefix = optimizer + "state.";
  return std::ranges::any_of(contents.tensors, [&](const formats::TensorEntry& tensor) {
    return is_state_by_number(tensor.meta.fqn, prefix);
  });
}

}  // namespace

LoadHints hints_for_load(const RefusedLoad& load) {
  LoadHints hints;
  find_renames(load, hints);
  for (const std::string& optimizer : optimizer_prefixes(load.source)) {
    const bool is_numbered = has_state_by_number(load.problems, optimizer + "state.");
    if (is_numbered && !numbers_parameters(load.wanted, optimizer)) {
      hints.numbered.push_back(optimizer);
    }
  }
  std::vector<const Finding*> rest;
  const auto add = [&](const Finding& problem) {
    const auto is_prefix = [&](const std::string& optimizer) {
      return problem.where.fqn.starts_with(optimizer + "state.") ||
             problem.where.fqn.starts_with(optimizer + "param_groups.");
    };
    if (std::ranges::none_of(hints.numbered, is_prefix)) rest.push_back(&problem);
  };
  for (std::size_t i = 0; i < load.problems.size(); ++i) {
    if (!hints.is_renamed[i]) add(load.problems[i]);
  }
  for (const Finding& problem : hints.after_renames) add(problem);
  std::vector<Rename> renames = load.options.renames;
  for (const RenamedNames& each : hints.renames) renames.push_back(each.rename);
  const auto is_more = [&](const Finding* problem) {
    return problem->rule == "unexpected" &&
           !has_first_component(formats::name_after_renames(problem->where.fqn, renames),
                                load.held);
  };
  const auto is_cast = [](const Finding* problem) { return is_cast_allowed_by_option(*problem); };
  if (std::ranges::all_of(rest,
                          [&](const Finding* each) { return is_more(each) || is_cast(each); })) {
    hints.has_more = load.options.only.selects_everything() && std::ranges::any_of(rest, is_more);
    hints.may_cast = load.options.cast == Relaxation::refuse && std::ranges::any_of(rest, is_cast);
  }
  hints.nearest = nearest_name(rest);
  return hints;
}

std::string line_of(const RenamedNames& found, std::string_view job) {
  const bool is_one = found.num_tensors == 1;
  std::string line = "'" + found.rename.from + "' in the checkpoint, '" + found.rename.to +
                     "' in " + std::string(job) + ": renamed? " +
                     std::to_string(found.num_tensors) +
                     (is_one ? " tensor has" : " tensors have") +
                     " the first name in the checkpoint, and the second name, with the same "
                     "shape, in " +
                     std::string(job);
  if (found.num_optimizer_problems > 0) {
    line += "; " + std::to_string(found.num_optimizer_problems) +
            " names of the optimizer differ in the same way";
  }
  return line;
}

bool has_state_by_number(const std::vector<Finding>& problems, std::string_view prefix) {
  return std::ranges::any_of(problems, [&](const Finding& problem) {
    return problem.rule == "unexpected" && is_state_by_number(problem.where.fqn, prefix);
  });
}

}  // namespace tessera::reshard
