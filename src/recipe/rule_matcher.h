#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "recipe/inputs.h"
#include "recipe/rules.h"

namespace tessera::recipe {

/// The inputs of one application of a rule. For a rule with `layers.{L}.…`, these are the tensors
/// of one layer. `streams` has, for each name template of `from`, its inputs by the numbers of the
/// captures that the rule stacks.
struct Instance {
  std::string rank;                   // `per_rank.<rank>.`, if the rule is applied to one rank's
                                      // own entries; else empty
  std::vector<std::string> captured;  // values of RuleMatcher::shared_captures
  std::vector<std::map<std::vector<std::int64_t>, std::size_t>> streams;
};

/// The result of matching a name: the rule, its name template that matches, and the values of the
/// captures.
struct Match {
  std::size_t rule;
  std::size_t stream;
  std::vector<std::string> captured;  // one per capture of the template
  std::string rank{};                 // as in Instance
};

/// RuleMatcher calls this for each problem. `rule`: the rule's name. `fqn`: the tensor's name.
using ReportProblem = std::function<void(std::string rule, const std::string& fqn,
                                         std::string expected, std::string found)>;

inline std::string rule_name(const Rule& rule) {
  return rule_name(rule.number);
}

/// Finds the rule for each input, and groups the inputs: one `Instance` for each application of a
/// rule (such as to one layer). Keeps references to its arguments.
class RuleMatcher {
 public:
  RuleMatcher(const Rules& rules, const std::string& prefix, const std::vector<Input>& inputs,
              ReportProblem report);

  /// Returns the rule that matches a name; nothing if none does. A rule that matches `<name>` also
  /// matches `per_rank.<rank>.<name>`. If two rules match, calls `report` and returns nothing.
  std::optional<Match> match(const std::string& name) const;
  /// Adds a matched input (a tensor) to the application of the rule that its captures select.
  void add(std::size_t input, Match match);
  /// Returns the applications of a rule (instances), sorted by captured values, and removes them
  /// from this object. Leaves out and reports an application that lacks a tensor. If a rule with
  /// operations has only some tensors of a rank, the others are those that all ranks share.
  std::vector<Instance> take_complete(std::size_t rule);

  /// Returns the captures that both sides of a rule have, sorted.
  const std::vector<std::string>& shared_captures(std::size_t rule) const { return shared_[rule]; }

 private:
  using Key = std::pair<std::string, std::vector<std::string>>;  // rank, captured values

  std::optional<Match> match(const std::string& name, std::string_view in_rules) const;
  void add_shared_inputs(std::size_t rule, Instance& instance) const;
  bool is_complete(std::size_t rule, const Instance& instance) const;
  std::string name_of(std::size_t rule, std::size_t stream, const Instance& instance,
                      const std::vector<std::int64_t>& stacked) const;

  const Rules& rules_;
  const std::string& prefix_;
  const std::vector<Input>& inputs_;
  ReportProblem report_;
  std::vector<std::map<Key, Instance>> instances_;  // one map per rule
  std::vector<std::vector<std::string>> shared_;    // one list per rule
};

}  // namespace tessera::recipe
