#include "recipe/transformation.h"

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <unordered_set>
#include <utility>

#include "formats/key_paths.h"
#include "recipe/inputs.h"
#include "recipe/rule_matcher.h"
#include "recipe/state_names.h"
#include "reshard/optimizer_rules.h"
#include "tessera/base/error.h"

namespace tessera::recipe {
namespace {

using formats::CheckpointContents;
using formats::Finding;
using formats::StateKind;
using formats::TensorEntry;

/// A tensor that one application of a rule has made.
struct MadeTensor {
  std::string name;
  BlockTensor tensor;
};

/// All that one application of a rule has made.
struct Made {
  std::vector<MadeTensor> tensors;
  std::vector<Requirement> requirements;
};

bool is_scalar(StateKind kind) {
  return kind == StateKind::scalar_parameter || kind == StateKind::scalar_table;
}

/// Returns whether an input of a rule's application to the entries of one rank is the rank's own.
/// `rank`: Instance::rank.
bool is_of_rank(const Input& input, const std::string& rank) {
  return input.name->starts_with(rank);
}

class Transformer {
 public:
  Transformer(const Rules& rules, const CheckpointContents& contents,
              std::vector<BlockTensor> sources, const std::string& prefix, NewNames new_names)
      : rules_(rules),
        contents_(contents),
        sources_(std::move(sources)),
        prefix_(prefix),
        new_names_(new_names),
        inputs_(contents, prefix),
        matcher_(rules, prefix, inputs_.all(),
                 [this](std::string rule, const std::string& fqn, std::string expected,
                        std::string found) {
                   problem(std::move(rule), fqn, std::move(expected), std::move(found));
                 }) {}

  Transformation run() {
    result_.targets.reserve(contents_.tensors.size());
    match_inputs();
    refuse_undecided_state();
    refuse_numbered_state();
    for (std::size_t r = 0; r < rules_.rules.size(); ++r) apply_rule(r);
    keep_rest();
    place_values();
    finish();
    return std::move(result_);
  }

 private:
  void problem(std::string rule, const std::string& fqn, std::string expected, std::string found) {
    result_.problems.push_back({.severity = Finding::Severity::error,
                                .rule = std::move(rule),
                                .where = {.path = rules_.path, .fqn = fqn},
                                .expected = std::move(expected),
                                .found = std::move(found)});
  }
  std::size_t index_of(const Rule& rule) const {
    return static_cast<std::size_t>(&rule - rules_.rules.data());
  }

  const Input& input_of(std::size_t number) const { return inputs_.all()[number]; }

  void match_inputs();
  void refuse_undecided_state();
  void refuse_numbered_state();
  void drop(std::size_t input);
  void add_dropped(const std::string& name, std::size_t tensor);

  void apply_rule(std::size_t r);
  bool finds_value(std::size_t r) const;
  std::optional<Made> make(const Rule& rule, const Instance& instance, Subject subject,
                           const std::function<BlockTensor(std::size_t)>& tensor_of);
  void add_requirements(const Rule& rule, const std::vector<std::string>& targets,
                        std::vector<Requirement> requirements);
  void add_made(const Rule& rule, const Instance& instance, const std::vector<std::size_t>& inputs);
  void follow_rename(const Rule& rule, const Input& parameter, const std::string& target);
  void follow_state(const Rule& rule, const Instance& instance,
                    const std::vector<std::size_t>& inputs,
                    const std::vector<std::string>& targets);
  void follow_pointwise(const Rule& rule, const Instance& instance,
                        const std::map<std::size_t, const State*>& states);
  void follow_scalar(const Rule& rule, const std::map<std::size_t, const State*>& states,
                     const std::vector<std::string>& targets);
  void add_state(const Rule& rule, const State& like, const std::string& parameter,
                 BlockTensor tensor);
  /// Returns the new parameter's name as an optimizer uses it: without the first components that
  /// the optimizer of the state `like` leaves out of names.
  std::string called_by_optimizer(const State& like, const std::string& parameter) const {
    return optimizer_name_of(parameter, like.name, rules_.wrappers);
  }

  /// Returns a name without wrapper components (such as `_orig_mod`), which rules do not have.
  std::string bare(const std::string& name) const { return rules_.wrappers.removed_from(name); }
  formats::KeyPath bare_path(const formats::KeyPath& path, const std::string& old_name,
                             const std::string& new_name) const {
    formats::KeyPath result = rules_.wrappers.removed_from(path, new_name);
    return result.empty() ? path_of_new_name(path, old_name, new_name) : result;
  }

  void add_new_name(const std::string& old_name, const std::string& new_name) {
    if (new_names_ == NewNames::collect) result_.new_names[old_name].push_back(new_name);
  }
  void set_targets(const Input& input, std::vector<std::string> targets) {
    if (inputs_.has_optimizer()) targets_of_[*input.name] = std::move(targets);
  }

  void keep_rest();
  void keep_input(const Input& input);
  void keep_state(const State& state, const std::string& parameter);
  void add_kept(std::size_t tensor, const std::string& old_name, const formats::KeyPath& old_path,
                const std::string& new_name);
  void place_values();
  void place_value(std::size_t v, const StateNames& names);
  /// Adds the problem that `form` gives the entry `source` a name with a negative number.
  void refuse_negative_number(const Rule& rule, const NameTemplate& form,
                              const std::string& source);
  void add_value(const std::string& name, formats::KeyPath path, std::size_t source);
  void find_aliases();
  void sort_targets();
  void finish();
  void check_tree();

  const Rules& rules_;
  const CheckpointContents& contents_;
  std::vector<BlockTensor> sources_;
  const std::string& prefix_;
  std::vector<std::optional<std::size_t>> rule_of_input_;
  // By tensor: its own name and its aliases.
  std::vector<std::size_t> num_names_ = std::vector<std::size_t>(contents_.tensors.size());
  std::vector<std::size_t> num_dropped_names_ = num_names_;
  // Becomes Transformation::targets_of.
  std::unordered_map<std::string_view, std::vector<std::string>> targets_of_;
  std::map<std::string, std::size_t> value_of_name_;
  /// The names of the targets made from aliases, each with its tensor's index in `contents_`.
  std::vector<std::pair<std::string, std::size_t>> alias_targets_;
  NewNames new_names_;
  Inputs inputs_;
  RuleMatcher matcher_;
  Transformation result_;
};

void Transformer::match_inputs() {
  for (const Rule& rule : rules_.rules) result_.uses.push_back({rule.number, 0, 0});
  rule_of_input_.resize(inputs_.all().size());
  for (const Input& input : inputs_.all()) {
    ++num_names_[input.tensor];
    for (const State& state : inputs_.states_of(input)) ++num_names_[state.tensor];
  }
  for (std::size_t i = 0; i < inputs_.all().size(); ++i) {
    std::optional<Match> found = matcher_.match(*input_of(i).name);
    if (!found) continue;
    rule_of_input_[i] = found->rule;
    ++result_.uses[found->rule].num_sources;
    if (rules_.rules[found->rule].drops()) {
      drop(i);
    } else {
      matcher_.add(i, *std::move(found));
    }
  }
}

/// Refuses state that may belong to several parameters, if a rule names one of these.
void Transformer::refuse_undecided_state() {
  if (inputs_.undecided().empty()) return;
  std::unordered_set<std::string_view> matched;
  for (std::size_t i = 0; i < rule_of_input_.size(); ++i) {
    if (rule_of_input_[i]) matched.insert(*input_of(i).name);
  }
  for (const Inputs::Undecided& state : inputs_.undecided()) {
    const auto& names = state.parameters;
    if (std::ranges::none_of(names, [&](auto name) { return matched.contains(name); })) continue;
    problem("state", *state.fqn, "one parameter that this state may belong to",
            printable(names[0]) + " and " + printable(names[1]));
    result_.problems.back().remedy = {Remedy::Action::drop_optimizer};
  }
}

/// Refuses state under numbers if operations change tensors, because nothing tells which of them
/// are the parameters of this state.
void Transformer::refuse_numbered_state() {
  const auto changes = [&](const Rule& rule) {
    return !rule.operations.empty() && result_.uses[index_of(rule)].num_sources > 0;
  };
  const auto rule = std::ranges::find_if(rules_.rules, changes);
  if (rule == rules_.rules.end()) return;
  const auto is_numbered = [&](const Input& input) {
    return inputs_.state_names().is_of_number(*input.name);
  };
  const auto state = std::ranges::find_if(inputs_.all(), is_numbered);
  if (state == inputs_.all().end()) return;
  problem(rule_name(*rule), *state->name,
          "state under the names of parameters, which can follow the operations of this rule",
          "state under numbers");
  result_.problems.back().remedy = {Remedy::Action::name_params};
}

/// Adds one name of a tensor that is dropped. The elements are lost with the last name.
void Transformer::add_dropped(const std::string& name, std::size_t tensor) {
  result_.dropped.push_back(name);
  if (++num_dropped_names_[tensor] != num_names_[tensor]) return;
  result_.num_dropped_elements +=
      static_cast<std::uint64_t>(contents_.tensors[tensor].meta.numel());
}

void Transformer::drop(std::size_t input) {
  const Input& dropped = input_of(input);
  add_dropped(*dropped.name, dropped.tensor);
  set_targets(dropped, {});
  for (const State& state : inputs_.states_of(dropped)) {
    add_dropped(*state.fqn, state.tensor);
  }
}

void Transformer::apply_rule(std::size_t r) {
  const Rule& rule = rules_.rules[r];
  if (result_.uses[r].num_sources == 0 && !rule.is_optional && !finds_value(r)) {
    problem(rule_name(rule), rule.from.front().text(),
            "a tensor of that name, or \"optional\": true", "none");
  }
  for (const Instance& instance : matcher_.take_complete(r)) {
    std::vector<std::size_t> inputs;
    for (const auto& stream : instance.streams) {
      for (const auto& [stacked, input] : stream) inputs.push_back(input);
    }
    add_made(rule, instance, inputs);
  }
}

/// Returns whether a rule matches the name of a value. A rule with operations matches no value.
/// Values are matched after tensors.
bool Transformer::finds_value(std::size_t r) const {
  const Rule& rule = rules_.rules[r];
  return (rule.drops() || rule.operations.empty()) &&
         std::ranges::any_of(contents_.values, [&](const formats::ValueEntry& value) {
           const std::optional<Match> found = matcher_.match(value.name);
           return found && found->rule == r;
         });
}

/// Applies the operations of a rule to the tensors that `tensor_of` returns for its inputs. If an
/// operation does not fit, reports a problem and returns nothing.
std::optional<Made> Transformer::make(const Rule& rule, const Instance& instance, Subject subject,
                                      const std::function<BlockTensor(std::size_t)>& tensor_of) {
  const std::vector<std::string>& shared = matcher_.shared_captures(index_of(rule));
  std::vector<Stream> streams(instance.streams.size());
  std::size_t first = 0;
  for (std::size_t s = 0; s < streams.size(); ++s) {
    for (const std::string& capture : rule.from[s].captures()) {
      if (!std::ranges::binary_search(shared, capture)) streams[s].captures.push_back(capture);
    }
    for (const auto& [stacked, input] : instance.streams[s]) {
      streams[s].tensors.emplace(stacked, tensor_of(input));
      if (s == 0 && streams[0].tensors.size() == 1) first = input;
    }
  }
  Applied applied;
  for (const Operation& operation : rule.operations) {
    try {
      apply(operation, subject, streams, applied);
    } catch (const ShapeProblem& wrong) {
      problem(rule_name(rule) + ", " + std::string(operation_name(operation)),
              *input_of(first).name, wrong.expected, wrong.found);
      return std::nullopt;
    }
  }
  result_.num_dropped_elements += static_cast<std::uint64_t>(applied.num_dropped);
  Made made{.tensors = {}, .requirements = std::move(applied.requirements)};
  for (std::size_t s = 0; s < streams.size(); ++s) {
    const std::vector<std::string>& unstacked = streams[s].captures;
    for (auto& [numbers, tensor] : streams[s].tensors) {
      std::vector<std::string> digits;  // one per capture in `unstacked`
      for (const std::int64_t number : numbers) digits.push_back(std::to_string(number));
      const auto value_of = [&](const std::string& capture) -> const std::string& {
        const auto place = std::ranges::lower_bound(shared, capture);
        if (place != shared.end() && *place == capture) {
          return instance.captured[static_cast<std::size_t>(place - shared.begin())];
        }
        return digits.at(
            static_cast<std::size_t>(std::ranges::find(unstacked, capture) - unstacked.begin()));
      };
      const auto name = rule.to[s].format(value_of);
      if (!name) {
        refuse_negative_number(rule, rule.to[s], *input_of(first).name);
        return std::nullopt;
      }
      made.tensors.push_back({instance.rank + prefix_ + *name, std::move(tensor)});
    }
  }
  return made;
}

/// Adds what must be equal in the source if one of these targets is read.
void Transformer::add_requirements(const Rule& rule, const std::vector<std::string>& targets,
                                   std::vector<Requirement> requirements) {
  for (Requirement& each : requirements) {
    result_.requirements.push_back({targets, rule.number, std::move(each)});
  }
}

void Transformer::refuse_negative_number(const Rule& rule, const NameTemplate& form,
                                         const std::string& source) {
  problem(rule_name(rule) + ", " + printable(form.text()), source, "numbers of 0 or more",
          "a negative number");
}

/// Adds the tensors that one application of a rule makes, and their optimizer state.
void Transformer::add_made(const Rule& rule, const Instance& instance,
                           const std::vector<std::size_t>& inputs) {
  std::optional<Made> made = make(rule, instance, Subject::parameter, [&](std::size_t input) {
    return sources_[input_of(input).tensor];
  });
  if (!made) return;
  const bool is_rename = rule.operations.empty();  // each input becomes one target
  TESSERA_CHECK(!is_rename || made->tensors.size() == inputs.size());
  std::vector<std::string> targets;
  for (MadeTensor& each : made->tensors) {
    const Input& from = input_of(inputs[is_rename ? targets.size() : 0]);
    targets.push_back(each.name);
    Target target{.entry = {}, .tensor = std::move(each.tensor), .rule = rule.number};
    target.entry.meta = {each.name, target.tensor.dtype, target.tensor.shape};
    if (is_rename) target.entry.kind = contents_.tensors[from.tensor].kind;
    target.entry.key_path = path_of_new_name(*from.key_path, *from.name, each.name);
    target.entry.dict_order = from.dict_order;
    if (from.is_alias && is_rename) alias_targets_.emplace_back(each.name, from.tensor);
    result_.targets.push_back(std::move(target));
  }
  add_requirements(rule, targets, std::move(made->requirements));
  result_.uses[index_of(rule)].num_targets += targets.size();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    const Input& input = input_of(inputs[i]);
    if (!is_of_rank(input, instance.rank)) continue;  // it has targets that all ranks share
    const std::vector<std::string> own = is_rename ? std::vector{targets[i]} : targets;
    for (const std::string& target : own) add_new_name(*input.name, target);
    set_targets(input, own);
    if (is_rename) follow_rename(rule, input, targets[i]);
  }
  if (!is_rename) follow_state(rule, instance, inputs, targets);
}

/// Adds the optimizer state of a renamed parameter, with the new name.
void Transformer::follow_rename(const Rule& rule, const Input& parameter,
                                const std::string& target) {
  for (const State& state : inputs_.states_of(parameter)) {
    add_state(rule, state, target, sources_[state.tensor]);
  }
}

void Transformer::follow_state(const Rule& rule, const Instance& instance,
                               const std::vector<std::size_t>& inputs,
                               const std::vector<std::string>& targets) {
  // Key: the parts of a state's name without the parameter's name (`optim.state.`, `.exp_avg`).
  // Value: the state with these parts, for each parameter.
  std::map<std::vector<std::string>, std::map<std::size_t, const State*>> groups;
  for (const std::size_t input : inputs) {
    if (!is_of_rank(input_of(input), instance.rank)) continue;
    for (const State& state : inputs_.states_of(input_of(input))) {
      const State*& slot = groups[{state.name.root, state.name.rest}][input];
      if (slot != nullptr) {
        problem(rule_name(rule), *state.fqn, "one state of this name for a parameter",
                "another, " + printable(*slot->fqn));
        return;
      }
      slot = &state;
    }
  }
  for (const auto& [name, states] : groups) {
    const State& first = *states.begin()->second;
    const std::string& fqn = *first.fqn;
    const auto missing =
        std::ranges::find_if(inputs, [&](std::size_t input) { return !states.contains(input); });
    if (missing != inputs.end()) {
      problem(rule_name(rule), fqn, "state of this name for all parameters that become one tensor",
              "none for " + *input_of(*missing).name);
    } else if (is_scalar(first.kind)) {
      follow_scalar(rule, states, targets);
    } else if (first.kind == StateKind::pointwise) {
      follow_pointwise(rule, instance, states);
    } else {
      problem(rule_name(rule), fqn, "state with one element for each element of its parameter",
              std::string(state_kind_name(first.kind)) +
                  " state, which cannot follow operations on the parameter's elements");
    }
  }
}

void Transformer::follow_pointwise(const Rule& rule, const Instance& instance,
                                   const std::map<std::size_t, const State*>& states) {
  for (const auto& [input, state] : states) {
    const TensorEntry& parameter = contents_.tensors[input_of(input).tensor];
    const TensorEntry& tensor = contents_.tensors[state->tensor];
    if (tensor.meta.shape == parameter.meta.shape) continue;
    problem(rule_name(rule), *state->fqn,
            "the shape of its parameter, " + shape_to_string(parameter.meta.shape),
            shape_to_string(tensor.meta.shape));
    return;
  }
  const bool is_copy = reshard::is_copy_of_parameter(states.begin()->second->name.state());
  std::optional<Made> made =
      make(rule, instance, is_copy ? Subject::parameter : Subject::pointwise_state,
           [&](std::size_t input) { return sources_[states.at(input)->tensor]; });
  if (!made) return;
  const State& first = *states.begin()->second;
  std::vector<std::string> targets;
  for (MadeTensor& each : made->tensors) {
    add_state(rule, first, each.name, std::move(each.tensor));
    targets.push_back(result_.targets.back().entry.meta.fqn);
  }
  add_requirements(rule, targets, std::move(made->requirements));
}

/// Adds scalar state (such as `step`) for each new parameter. If a new parameter is made from
/// several old parameters, their scalars must be equal.
void Transformer::follow_scalar(const Rule& rule, const std::map<std::size_t, const State*>& states,
                                const std::vector<std::string>& targets) {
  const State& first = *states.begin()->second;
  const BlockTensor& tensor = sources_[first.tensor];
  for (const auto& [input, state] : states) {
    const BlockTensor& other = sources_[state->tensor];
    if (other.shape != tensor.shape || other.dtype != tensor.dtype) {
      problem(rule_name(rule), *state->fqn, "the shape and dtype of " + *first.fqn,
              shape_to_string(other.shape) + " " + std::string(dtype_name(other.dtype)));
      return;
    }
  }
  std::vector<std::string> made;
  for (const std::string& target : targets) {
    add_state(rule, first, target, tensor);
    made.push_back(result_.targets.back().entry.meta.fqn);
  }
  std::vector<Requirement> equal;
  for (const auto& [input, state] : states) {
    const BlockTensor& other = sources_[state->tensor];
    if (!have_same_blocks(tensor, other)) equal.push_back({other, tensor});
  }
  add_requirements(rule, made, std::move(equal));
}

/// Adds optimizer state of a new parameter. Its name is that of `like`, with the new parameter's
/// name instead of the old one's.
void Transformer::add_state(const Rule& rule, const State& like, const std::string& parameter,
                            BlockTensor tensor) {
  const std::string called = called_by_optimizer(like, parameter);
  Target target{.entry = {}, .tensor = std::move(tensor), .rule = rule.number};
  target.entry.meta = {name_of_state(like.name, called), target.tensor.dtype, target.tensor.shape};
  target.entry.kind = like.kind;
  target.entry.parameter = parameter;
  target.entry.key_path = path_of_state(*like.key_path, like.name, called);
  target.entry.dict_order = like.dict_order;
  add_new_name(*like.fqn, target.entry.meta.fqn);
  if (like.is_alias) alias_targets_.emplace_back(target.entry.meta.fqn, like.tensor);
  result_.targets.push_back(std::move(target));
}

// Tensors that no rule names

void Transformer::keep_rest() {
  for (std::size_t i = 0; i < inputs_.all().size(); ++i) {
    if (rule_of_input_[i]) continue;
    if (rules_.rest == Rest::refuse) {
      problem("rest", *input_of(i).name, "a rule for this name, or \"rest\": \"keep\"", "neither");
    }
    keep_input(input_of(i));
  }
}

void Transformer::keep_input(const Input& input) {
  const std::string name = bare(*input.name);
  add_kept(input.tensor, *input.name, *input.key_path, name);
  result_.targets.back().entry.dict_order = input.dict_order;
  if (input.is_alias) alias_targets_.emplace_back(name, input.tensor);
  if (name != *input.name) set_targets(input, {name});
  for (const State& state : inputs_.states_of(input)) keep_state(state, name);
}

void Transformer::keep_state(const State& state, const std::string& parameter) {
  const bool has_new_name = parameter != state.name.full_name;
  const std::string name =
      has_new_name ? name_of_state(state.name, called_by_optimizer(state, parameter)) : *state.fqn;
  add_kept(state.tensor, *state.fqn, *state.key_path, name);
  if (state.is_alias) alias_targets_.emplace_back(name, state.tensor);
  TensorEntry& entry = result_.targets.back().entry;
  entry.dict_order = state.dict_order;
  if (!entry.parameter.empty()) entry.parameter = parameter;
  if (!has_new_name) return;
  entry.kind = state.kind;
  entry.parameter = parameter;
  entry.key_path =
      path_of_state(*state.key_path, state.name, called_by_optimizer(state, parameter));
}

/// Adds a source tensor that no rule names: the same elements under `new_name`, which is `old_name`
/// without wrapper components.
void Transformer::add_kept(std::size_t tensor, const std::string& old_name,
                           const formats::KeyPath& old_path, const std::string& new_name) {
  Target target{.entry = contents_.tensors[tensor], .tensor = sources_[tensor], .rule = 0};
  target.entry.pieces.clear();
  target.entry.meta.fqn = new_name;
  target.entry.key_path = old_name == new_name ? old_path : bare_path(old_path, old_name, new_name);
  if (old_name != new_name) add_new_name(old_name, new_name);
  result_.targets.push_back(std::move(target));
}

// Values

void Transformer::place_values() {
  for (std::size_t v = 0; v < contents_.values.size(); ++v) place_value(v, inputs_.state_names());
}

void Transformer::place_value(std::size_t v, const StateNames& names) {
  const formats::ValueEntry& value = contents_.values[v];
  if (const auto state = names.find(value.name)) {
    const auto targets = targets_of_.find(state->name.full_name);
    if (targets == targets_of_.end()) return add_value(value.name, value.key_path, v);
    if (targets->second.empty()) result_.dropped.push_back(value.name);
    for (const std::string& target : targets->second) {
      const std::string called = optimizer_name_of(target, state->name, rules_.wrappers);
      add_value(name_of_state(state->name, called),
                path_of_state(value.key_path, state->name, called), v);
    }
    return;
  }
  const std::optional<Match> found = matcher_.match(value.name);
  if (!found) {
    const std::string name = bare(value.name);
    return add_value(name, bare_path(value.key_path, value.name, name), v);
  }
  const Rule& rule = rules_.rules[found->rule];
  ++result_.uses[found->rule].num_sources;
  if (rule.drops()) {
    result_.dropped.push_back(value.name);
  } else if (rule.operations.empty()) {
    const std::vector<std::string>& captures = rule.from[found->stream].captures();
    const std::size_t target = found->stream < rule.to.size() ? found->stream : 0;
    const auto made_name =
        rule.to[target].format([&](const std::string& capture) -> const std::string& {
          const auto place = std::ranges::lower_bound(captures, capture) - captures.begin();
          return found->captured[static_cast<std::size_t>(place)];
        });
    if (!made_name) return refuse_negative_number(rule, rule.to[target], value.name);
    const std::string name = found->rank + prefix_ + *made_name;
    add_value(name, path_of_new_name(value.key_path, value.name, name), v);
  } else {
    problem(rule_name(rule), value.name, "a tensor, as the rule has operations",
            "a value that is no tensor");
  }
}

void Transformer::add_value(const std::string& name, formats::KeyPath path, std::size_t source) {
  const auto [known, is_new] = value_of_name_.emplace(name, result_.values.size());
  if (is_new) {
    result_.values.push_back(
        {{name, std::move(path), contents_.values[source].dict_order}, {source}});
  } else {
    result_.values[known->second].sources.push_back(source);
  }
}

/// Restores aliases: if the new tensor made from an alias still equals the one made from the
/// alias's tensor, or from another alias of it, it becomes an alias again.
void Transformer::find_aliases() {
  // The targets that have the first elements of a source tensor in their order, by its index.
  std::multimap<std::size_t, const Target*> whole;
  std::set<std::string_view> of_aliases;
  for (const auto& [name, tensor] : alias_targets_) of_aliases.insert(name);
  std::map<std::string_view, const Target*> target_of;  // made from an alias
  for (const Target& target : result_.targets) {
    if (of_aliases.contains(target.entry.meta.fqn)) {
      target_of.emplace(target.entry.meta.fqn, &target);
      continue;
    }
    if (target.tensor.blocks.size() != 1) continue;
    const std::uint32_t source = target.tensor.blocks.front().source;
    if (source == kConstant || !is_whole(target.tensor, source, target.tensor.shape)) continue;
    whole.emplace(source, &target);
  }
  std::map<std::string, std::string> aliases;
  for (const auto& [name, tensor] : alias_targets_) {
    const BlockTensor& elements = sources_[tensor];
    if (elements.blocks.size() != 1) continue;
    const std::uint32_t source = elements.blocks.front().source;
    if (!is_whole(elements, source, elements.shape)) continue;
    const auto [begin, end] = whole.equal_range(source);
    const auto equal = std::find_if(begin, end, [&](const auto& target) {  // not a slice of it
      return target.second->tensor.shape == elements.shape;
    });
    if (equal != end) {
      aliases.emplace(name, equal->second->entry.meta.fqn);
    } else {
      whole.emplace(source, target_of.at(name));
    }
  }
  std::erase_if(result_.targets, [&](const Target& target) {
    const auto alias = aliases.find(target.entry.meta.fqn);
    if (alias == aliases.end()) return false;
    result_.aliases.push_back(
        {alias->first, alias->second, target.entry.key_path, target.entry.dict_order});
    return true;
  });
  for (Target& target : result_.targets) {  // a recorded parameter is a tensor, not an alias
    const auto alias = aliases.find(target.entry.parameter);
    if (alias != aliases.end()) target.entry.parameter = alias->second;
  }
}

/// Sorts the targets by name. Moves each target only once, because targets are large.
void Transformer::sort_targets() {
  std::vector<std::pair<std::string_view, std::size_t>> order;
  order.reserve(result_.targets.size());
  for (std::size_t i = 0; i < result_.targets.size(); ++i) {
    order.emplace_back(result_.targets[i].entry.meta.fqn, i);
  }
  std::ranges::sort(order);
  std::vector<Target> sorted;
  sorted.reserve(order.size());
  for (const auto& [name, i] : order) sorted.push_back(std::move(result_.targets[i]));
  result_.targets = std::move(sorted);
}

/// Sorts the result, and reports names that occur twice.
void Transformer::finish() {
  result_.targets_of = std::move(targets_of_);
  if (inputs_.has_optimizer()) result_.state_names = inputs_.take_state_names();
  if (!alias_targets_.empty()) find_aliases();
  sort_targets();
  std::ranges::sort(result_.aliases, {}, &formats::Alias::fqn);
  std::ranges::sort(result_.values, {}, [](const ValueTarget& value) -> const std::string& {
    return value.entry.name;
  });
  std::unordered_set<std::string_view> seen;
  seen.reserve(result_.targets.size());
  const auto claim = [&](const std::string& name) {
    if (seen.insert(name).second) return;
    problem("names", name, "one tensor or value of that name", "two");
  };
  for (const Target& target : result_.targets) claim(target.entry.meta.fqn);
  for (const formats::Alias& alias : result_.aliases) claim(alias.fqn);
  for (const ValueTarget& value : result_.values) claim(value.entry.name);
  if (result_.problems.empty()) check_tree();
}

/// Reports new names that cannot be together in one nested dict, such as `d` and `d.x`.
void Transformer::check_tree() {
  formats::CheckpointContents contents;
  for (const Target& target : result_.targets) contents.tensors.push_back(target.entry);
  for (const ValueTarget& value : result_.values) contents.values.push_back(value.entry);
  contents.aliases = result_.aliases;
  try {
    formats::check_key_paths(contents, "");
  } catch (const Error& wrong) {
    problem("names", wrong.where().fqn, "names that fit into one nested dict",
            std::string(wrong.reason()));
  }
}

}  // namespace

Transformation transform(const Rules& rules, const CheckpointContents& contents,
                         std::vector<BlockTensor> sources, const std::string& prefix,
                         NewNames new_names) {
  return Transformer(rules, contents, std::move(sources), prefix, new_names).run();
}

std::vector<BlockTensor> whole_tensors_of(const CheckpointContents& contents) {
  std::vector<BlockTensor> tensors;
  for (std::size_t i = 0; i < contents.tensors.size(); ++i) {
    const TensorMeta& meta = contents.tensors[i].meta;
    tensors.push_back(whole_tensor_of(static_cast<std::uint32_t>(i), meta.dtype, meta.shape));
  }
  return tensors;
}

}  // namespace tessera::recipe
