#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "recipe/element_reader.h"
#include "recipe/megatron_names.h"
#include "recipe/megatron_rows.h"
#include "recipe/rules.h"
#include "recipe/transformation.h"
#include "tessera/base/error.h"
#include "tessera/recipe/recipe.h"

namespace tessera::recipe {
namespace {

using formats::CheckpointContents;
using formats::Finding;

Finding finding(const Rules& rules, std::string rule, std::string fqn, std::string expected,
                std::string found) {
  return {.severity = Finding::Severity::error,
          .rule = std::move(rule),
          .where = {.path = rules.path, .fqn = std::move(fqn)},
          .expected = std::move(expected),
          .found = std::move(found)};
}

/// Groups source tensors that must be equal, because the recipe merges them into one. `find`
/// returns the first tensor of a tensor's group.
class EqualSources {
 public:
  explicit EqualSources(const Transformation& made) {
    for (const TargetRequirement& each : made.requirements) {
      const auto& a = each.requirement.tensor.blocks;
      const auto& b = each.requirement.expected.blocks;
      if (a.size() != 1 || b.size() != 1 || a[0].source == kConstant || b[0].source == kConstant) {
        continue;
      }
      first_[find(std::max(a[0].source, b[0].source))] = find(std::min(a[0].source, b[0].source));
    }
  }
  std::uint32_t find(std::uint32_t source) const {
    for (auto next = first_.find(source); next != first_.end() && next->second != source;
         next = first_.find(source)) {
      source = next->second;
    }
    return source;
  }

 private:
  std::map<std::uint32_t, std::uint32_t> first_;
};

/// Applies rules to the names and shapes of a checkpoint, and the inverse to the result. Reports
/// what is dropped, what the inverse does not give back, and why the rules cannot be applied.
class Proof {
 public:
  Proof(const Rules& rules, const CheckpointContents& contents, const std::string& prefix)
      : rules_(rules), contents_(contents), prefix_(prefix) {}

  RecipeReport run() {
    Transformation made =
        transform(rules_, contents_, whole_tensors_of(contents_), prefix_, NewNames::leave_out);
    report_.problems = std::move(made.problems);
    report_.rules = made.uses;
    report_.dropped = made.dropped;
    report_.num_dropped_elements = made.num_dropped_elements;
    count_sources();
    for (const Target& target : made.targets) check_target(target);
    take_targets(made);
    note_unread(made);
    if (!report_.problems.empty()) return std::move(report_);
    check_placed(made);
    check_inverse(std::move(made));
    return std::move(report_);
  }

 private:
  void count_sources() {
    report_.num_sources = contents_.tensors.size();
    placed_.resize(contents_.tensors.size());
    for (const formats::TensorEntry& tensor : contents_.tensors) {
      report_.num_source_elements += static_cast<std::uint64_t>(tensor.meta.numel());
    }
  }

  /// Checks that the blocks of a new tensor cover it exactly once, and counts the elements that
  /// they take from the source.
  void check_target(const Target& target) {
    ++(target.rule == 0 ? report_.num_kept : report_.num_targets);
    std::vector<Region> boxes;
    for (const Block& block : target.tensor.blocks) {
      boxes.emplace_back(block.box);
      if (block.source != kConstant && blocks_.insert(elements_of(block)).second) {
        placed_[block.source] += block.box.numel();
      }
      is_exact_ = is_exact_ && (block.source == kConstant || block.added == 0);
      if (block.source == kConstant && !bytes_of_number(block.added, target.tensor.dtype)) {
        report_.problems.push_back(finding(
            rules_, rule_name(target.rule), target.entry.meta.fqn,
            "a padding value that " + std::string(dtype_name(target.tensor.dtype)) + " can hold",
            std::to_string(block.added)));
      }
    }
    for (const CoverageProblem& wrong : check_coverage(boxes, target.tensor.shape)) {
      report_.problems.push_back(
          finding(rules_, "coverage", target.entry.meta.fqn, "each element once", wrong.detail));
    }
  }

  /// Returns numbers that are equal for two blocks if they have the same source elements, in the
  /// same order and shape.
  static std::vector<std::int64_t> elements_of(const Block& block) {
    std::vector<std::int64_t> elements{block.source, block.offset};
    for (std::size_t d = 0; d < block.box.sizes.size(); ++d) {
      if (block.box.sizes[d] == 1) continue;  // its stride means nothing
      elements.push_back(block.box.sizes[d]);
      elements.push_back(block.strides[d]);
    }
    return elements;
  }

  /// Counts the source elements that are in new tensors or merged with others. Adds a note for each
  /// source tensor that loses elements, unless the whole tensor is dropped or merged.
  void check_placed(const Transformation& made) {
    const std::set<std::string_view> dropped(made.dropped.begin(), made.dropped.end());
    std::set<std::uint32_t> merged;
    for (const TargetRequirement& each : made.requirements) {
      for (const Block& block : each.requirement.tensor.blocks) {
        if (block.source == kConstant) continue;
        merged.insert(block.source);
        report_.num_equal_elements += static_cast<std::uint64_t>(block.box.numel());
      }
    }
    for (std::size_t i = 0; i < placed_.size(); ++i) {
      const TensorMeta& meta = contents_.tensors[i].meta;
      report_.num_placed_elements += static_cast<std::uint64_t>(std::min(placed_[i], meta.numel()));
      if (placed_[i] == meta.numel() || dropped.contains(meta.fqn)) continue;
      if (placed_[i] > meta.numel() || merged.contains(static_cast<std::uint32_t>(i))) continue;
      report_.notes.push_back(
          {.severity = Finding::Severity::note,
           .rule = "dropped",
           .where = {.path = rules_.path, .fqn = meta.fqn},
           .expected = "all " + std::to_string(meta.numel()) + " elements",
           .found = std::to_string(placed_[i]) + " elements; the recipe drops the others"});
    }
    if (is_exact_) return;
    report_.notes.push_back({.severity = Finding::Severity::note,
                             .rule = "add",
                             .where = {.path = rules_.path},
                             .expected = "the same numbers after the inverse",
                             .found = "additions, which round: the last bits may change"});
  }

  /// Adds a note about values that must be equal. Only a move compares them, because this proof
  /// reads no values.
  void note_unread(const Transformation& made) {
    std::string found;
    const auto merged = std::ranges::find_if(
        made.values, [](const ValueTarget& value) { return value.sources.size() > 1; });
    if (merged != made.values.end()) {
      found = "values that become one, such as " + printable(merged->entry.name);
    }
    const auto groups = std::ranges::find_if(made.values, [](const ValueTarget& value) {
      const std::string& name = value.entry.name;
      return name.find("param_groups") != std::string::npos &&
             (name.ends_with("param_groups") || name.ends_with(".params"));
    });
    if (groups != made.values.end() && joins_parameters(made)) {
      found += (found.empty() ? "" : ", and ") + std::string("parameter groups that become") +
               " one, in " + printable(groups->entry.name);
    }
    if (found.empty()) return;
    report_.notes.push_back({.severity = Finding::Severity::note,
                             .rule = "values",
                             .where = {.path = rules_.path},
                             .expected = "values that this check can compare",
                             .found = found + " (only the move compares them)"});
  }

  /// Returns whether several parameters with optimizer state become one.
  static bool joins_parameters(const Transformation& made) {
    std::set<std::string_view> seen;
    return std::ranges::any_of(made.targets_of, [&](const auto& each) {
      return std::ranges::any_of(
          each.second, [&](const std::string& target) { return !seen.insert(target).second; });
    });
  }

  void take_targets(const Transformation& made) {
    report_.targets.world_size = contents_.world_size;
    report_.targets.tensors.reserve(made.targets.size());
    for (const Target& target : made.targets) report_.targets.tensors.push_back(target.entry);
    report_.targets.aliases = made.aliases;
    for (const ValueTarget& value : made.values) report_.targets.values.push_back(value.entry);
  }

  /// Applies the inverse of the rules to the new tensors, and compares the result with the source.
  void check_inverse(Transformation made) {
    Rules back;
    try {
      back = inverse_of(rules_);
    } catch (const Error& error) {
      report_.notes.push_back({.severity = Finding::Severity::note,
                               .rule = "inverse",
                               .where = error.where(),
                               .expected = "an inverse of each rule",
                               .found = std::string(error.reason())});
      return;
    }
    const EqualSources equal(made);
    const std::set<std::string_view> dropped(made.dropped.begin(), made.dropped.end());
    std::vector<BlockTensor> elements;
    elements.reserve(made.targets.size());
    for (Target& target : made.targets) elements.push_back(std::move(target.tensor));
    // Makes the inverse rules optional: if a rule has matched nothing, or only values, its inverse
    // has no tensors to match.
    for (Rule& rule : back.rules) rule.is_optional = true;
    const Transformation again =
        transform(back, report_.targets, std::move(elements), prefix_, NewNames::leave_out);
    std::vector<Finding> problems;
    for (Finding wrong : again.problems) {
      wrong.rule = "inverse, " + wrong.rule;
      problems.push_back(std::move(wrong));
    }
    compare(again, equal, dropped, problems);
    note_wrappers();
    report_.is_invertible = problems.empty() && num_wrapped() == 0;
    report_.problems.insert(report_.problems.end(), problems.begin(), problems.end());
  }

  std::size_t num_wrapped() const {
    if (rules_.wrappers.empty()) return 0;
    return static_cast<std::size_t>(
        std::ranges::count_if(contents_.tensors, [&](const formats::TensorEntry& tensor) {
          return rules_.wrappers.removed_from(tensor.meta.fqn) != tensor.meta.fqn;
        }));
  }

  void note_wrappers() {
    const std::size_t count = num_wrapped();
    if (count == 0) return;
    report_.notes.push_back(
        {.severity = Finding::Severity::note,
         .rule = "unwrap",
         .where = {.path = rules_.path},
         .expected = "the source's names after the inverse",
         .found = std::to_string(count) + " names without the wrappers that \"unwrap\" removes"});
  }

  void compare(const Transformation& again, const EqualSources& equal,
               const std::set<std::string_view>& dropped, std::vector<Finding>& problems) {
    const auto name_of = [](const Target& target) -> const std::string& {
      return target.entry.meta.fqn;
    };
    for (std::size_t i = 0; i < contents_.tensors.size(); ++i) {
      const TensorMeta& meta = contents_.tensors[i].meta;
      if (dropped.contains(meta.fqn)) continue;
      std::string bare = rules_.wrappers.removed_from(meta.fqn);
      const auto alias = std::ranges::lower_bound(again.aliases, bare, {}, &formats::Alias::fqn);
      if (alias != again.aliases.end() && alias->fqn == bare) bare = alias->target;
      const auto found = std::ranges::lower_bound(again.targets, bare, {}, name_of);
      if (found == again.targets.end() || name_of(*found) != bare) {
        problems.push_back(finding(rules_, "inverse", meta.fqn, "the source tensor", "none"));
        continue;
      }
      if (placed_[i] < meta.numel()) {  // the recipe drops elements, which do not come back
        if (found->tensor.shape == meta.shape) continue;
      }
      BlockTensor tensor = found->tensor;
      for (Block& block : tensor.blocks) {
        if (block.source != kConstant) block.source = equal.find(block.source);
      }
      const std::uint32_t expected = equal.find(static_cast<std::uint32_t>(i));
      if (is_whole(tensor, expected, meta.shape) && tensor.dtype == meta.dtype) continue;
      problems.push_back(
          finding(rules_, "inverse", meta.fqn, "the source tensor, " + shape_to_string(meta.shape),
                  tensor.shape == meta.shape ? "other elements" : shape_to_string(tensor.shape)));
    }
  }

  const Rules& rules_;
  const CheckpointContents& contents_;
  const std::string& prefix_;
  RecipeReport report_;
  // All blocks of new tensors. A tensor that the recipe duplicates has its blocks in several new
  // tensors, but its elements are counted once.
  std::set<std::vector<std::int64_t>> blocks_;
  std::vector<std::int64_t> placed_;  // number of elements, by tensor of the source
  bool is_exact_ = true;
};

}  // namespace

RecipeReport check_recipe(const Recipe& recipe, const CheckpointContents& contents,
                          const RecipeOptions& options) {
  const Rules rules = rules_of(recipe, options);
  RecipeReport report{.targets = contents};
  const auto apply = [&](const Rules& each, const std::string& prefix) {
    RecipeReport next = Proof(each, report.targets, prefix).run();
    next.notes.insert(next.notes.begin(), report.notes.begin(), report.notes.end());
    next.dropped.insert(next.dropped.begin(), report.dropped.begin(), report.dropped.end());
    report = std::move(next);
    return report.problems.empty();
  };
  // Rules for Megatron's names are not in the recipe.
  const auto without_rules = [&] {
    report.rules.clear();
    return std::move(report);
  };
  if (const auto named = rules_for_megatron(recipe, options.direction, contents, recipe.path())) {
    if (!apply(*named, "")) return without_rules();
  }
  if (is_from_megatron(recipe, options.direction) && !options.megatron_arguments.empty() &&
      use_rows(rules, options.prefix, report.targets)) {
    const auto ordered =
        rules_for_rows(recipe.path(), report.targets,
                       row_orders_in(options.megatron_arguments.front()), recipe.path());
    if (ordered) {
      if (!apply(ordered->rules, "")) return without_rules();
      report.notes.push_back(ordered->note);
    }
  }
  apply(rules, options.prefix);
  return report;
}

}  // namespace tessera::recipe
