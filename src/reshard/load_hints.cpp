#include "reshard/load_hints.h"

#include <algorithm>

#include "base/cast.h"
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

}  // namespace

LoadHints hints_for_load(const std::vector<Finding>& problems,
                         const formats::CheckpointContents& source,
                         const formats::CheckpointContents& wanted, const LoadPlanOptions& options,
                         const std::vector<std::string>& held) {
  LoadHints hints;
  hints.renames = find_renames(problems, source, wanted, options.renames, hints.is_renamed);
  for (const std::string& optimizer : optimizer_prefixes(source)) {
    hints.has_numbered_state |= has_state_by_number(problems, optimizer + "state.");
  }
  if (hints.has_numbered_state) return hints;
  std::vector<const Finding*> rest;
  for (std::size_t i = 0; i < problems.size(); ++i) {
    if (!hints.is_renamed[i]) rest.push_back(&problems[i]);
  }
  const auto is_more = [&](const Finding* problem) {
    return problem->rule == "unexpected" && !has_first_component(problem->where.fqn, held);
  };
  const auto is_cast = [](const Finding* problem) { return is_cast_allowed_by_option(*problem); };
  if (std::ranges::all_of(rest,
                          [&](const Finding* each) { return is_more(each) || is_cast(each); })) {
    hints.has_more = options.only.selects_everything() && std::ranges::any_of(rest, is_more);
    hints.may_cast = options.cast == Relaxation::refuse && std::ranges::any_of(rest, is_cast);
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
    const std::string& name = problem.where.fqn;
    if (problem.rule != "unexpected" || !name.starts_with(prefix)) return false;
    const std::string rest = name.substr(prefix.size());
    const std::size_t end = rest.find_first_not_of("0123456789");
    return end != 0 && end != std::string::npos && rest[end] == '.' &&
           rest.find('.', end + 1) == std::string::npos;
  });
}

}  // namespace tessera::reshard
