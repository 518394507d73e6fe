#include "recipe/rule_matcher.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>

#include "formats/per_rank.h"

namespace tessera::recipe {
namespace {

std::int64_t to_number(const std::string& digits) {
  std::int64_t number = 0;
  std::from_chars(digits.data(), digits.data() + digits.size(), number);
  return number;
}

}  // namespace

RuleMatcher::RuleMatcher(const Rules& rules, const std::string& prefix,
                         const std::vector<Input>& inputs, ReportProblem report)
    : rules_(rules), prefix_(prefix), inputs_(inputs), report_(std::move(report)) {
  instances_.resize(rules.rules.size());
  for (const Rule& rule : rules.rules) shared_.push_back(rule.shared_captures());
}

std::optional<Match> RuleMatcher::match(const std::string& name) const {
  const bool has_wrappers = !rules_.wrappers.empty();
  const std::string unwrapped = has_wrappers ? rules_.wrappers.removed_from(name) : "";
  const std::string_view whole = has_wrappers ? unwrapped : name;
  auto found = match(name, whole);
  const std::string_view shared = formats::name_without_rank(whole);
  if (found || shared.size() == whole.size()) return found;
  found = match(name, shared);
  if (found) found->rank = whole.substr(0, whole.size() - shared.size());
  return found;
}

/// `in_rules`: the part of `name` that rules may match.
std::optional<Match> RuleMatcher::match(const std::string& name, std::string_view in_rules) const {
  if (!in_rules.starts_with(prefix_)) return std::nullopt;
  in_rules.remove_prefix(prefix_.size());
  std::optional<Match> found;
  for (std::size_t r = 0; r < rules_.rules.size(); ++r) {
    const Rule& rule = rules_.rules[r];
    for (std::size_t s = 0; s < rule.from.size(); ++s) {
      auto captured = rule.from[s].match(in_rules);
      if (!captured) continue;
      if (found) {
        report_(rule_name(rule), name, "one rule whose \"from\" matches this name",
                "also " + rule_name(rules_.rules[found->rule]));
        return std::nullopt;
      }
      found = Match{.rule = r, .stream = s, .captured = *std::move(captured)};
      break;
    }
  }
  return found;
}

void RuleMatcher::add(std::size_t input, Match match) {
  const Rule& rule = rules_.rules[match.rule];
  const std::vector<std::string>& shared = shared_[match.rule];
  const std::vector<std::string>& captures = rule.from[match.stream].captures();
  Key key{std::move(match.rank), {}};
  std::vector<std::int64_t> stacked;
  for (std::size_t c = 0; c < captures.size(); ++c) {
    if (std::ranges::binary_search(shared, captures[c])) {
      key.second.push_back(std::move(match.captured[c]));
    } else {
      stacked.push_back(to_number(match.captured[c]));
    }
  }
  Instance& instance = instances_[match.rule][key];
  if (instance.streams.empty()) {
    instance.rank = std::move(key.first);
    instance.captured = std::move(key.second);
    instance.streams.resize(rule.from.size());
  }
  const auto [known, is_new] = instance.streams[match.stream].emplace(std::move(stacked), input);
  if (is_new) return;
  report_(rule_name(rule), *inputs_[input].name,
          "captures that differ from the captures of " + *inputs_[known->second].name,
          "the same captures");
}

std::vector<Instance> RuleMatcher::take_complete(std::size_t rule) {
  std::vector<Instance> complete;
  for (auto& [key, instance] : instances_[rule]) {
    if (!instance.rank.empty()) add_shared_inputs(rule, instance);
  }
  for (auto& [key, instance] : instances_[rule]) {
    if (is_complete(rule, instance)) complete.push_back(std::move(instance));
  }
  instances_[rule].clear();
  return complete;
}

/// Adds the tensors that all ranks share to an application to entries of one rank, if it lacks
/// them. A rule without operations renames each tensor on its own, so it needs no others.
void RuleMatcher::add_shared_inputs(std::size_t rule, Instance& instance) const {
  if (rules_.rules[rule].operations.empty()) return;
  const auto shared = instances_[rule].find({std::string(), instance.captured});
  if (shared == instances_[rule].end()) return;
  for (std::size_t s = 0; s < instance.streams.size(); ++s) {
    const auto& stream = shared->second.streams[s];
    instance.streams[s].insert(stream.begin(), stream.end());
  }
}

bool RuleMatcher::is_complete(std::size_t rule, const Instance& instance) const {
  if (!instance.rank.empty() && rules_.rules[rule].operations.empty()) return true;
  std::map<std::vector<std::int64_t>, std::size_t> all;
  for (const auto& stream : instance.streams) all.insert(stream.begin(), stream.end());
  bool is_complete = true;
  for (std::size_t s = 0; s < instance.streams.size(); ++s) {
    if (instance.streams[s].size() == all.size()) continue;
    for (const auto& [stacked, input] : all) {
      if (instance.streams[s].contains(stacked)) continue;
      report_(rule_name(rules_.rules[rule]), name_of(rule, s, instance, stacked),
              "a tensor of this name, because there is " + *inputs_[input].name, "none");
      is_complete = false;
    }
  }
  return is_complete;
}

/// Returns the name of the input that `from[stream]` stands for in `instance`. Captures that both
/// sides of the rule have take their values from `instance`. The other captures, over which the
/// rule stacks, take the numbers in `stacked`, in order (`experts.{E}` with 3: `experts.3`).
std::string RuleMatcher::name_of(std::size_t rule, std::size_t stream, const Instance& instance,
                                 const std::vector<std::int64_t>& stacked) const {
  const std::vector<std::string>& shared = shared_[rule];
  const NameTemplate& form = rules_.rules[rule].from[stream];
  std::map<std::string, std::string> values;
  std::size_t number = 0;
  for (const std::string& capture : form.captures()) {
    const auto place = std::ranges::lower_bound(shared, capture);
    const bool is_shared = place != shared.end() && *place == capture;
    values[capture] = is_shared
                          ? instance.captured[static_cast<std::size_t>(place - shared.begin())]
                          : std::to_string(stacked[number++]);
  }
  const auto name = form.format(
      [&](const std::string& capture) -> const std::string& { return values.at(capture); });
  return instance.rank + prefix_ + name.value_or(form.text());
}

}  // namespace tessera::recipe
