#pragma once

#include <cstddef>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "recipe/expression.h"
#include "recipe/name_template.h"
#include "recipe/operation.h"
#include "recipe/wrappers.h"
#include "tessera/base/value.h"
#include "tessera/recipe/recipe.h"

namespace tessera::recipe {

/// Rule::number of the rules that rules_for_megatron returns. No rule of a recipe has this number.
inline constexpr std::size_t kMegatronRule = std::numeric_limits<std::size_t>::max();

/// Returns the name of a rule for messages: `rule 3`, or `Megatron's names`.
inline std::string rule_name(std::size_t number) {
  return number == kMegatronRule ? "Megatron's names" : "rule " + std::to_string(number);
}

/// A rule of a recipe, with all expressions evaluated to numbers.
struct Rule {
  std::size_t number = 0;            // position in the recipe, from 1; or kMegatronRule
  std::vector<NameTemplate> from{};  // all with the same captures
  std::vector<NameTemplate> to{};    // all with the same captures; empty: the rule drops its inputs
  std::vector<Operation> operations{};
  bool is_optional = false;  // no error if it matches nothing

  bool drops() const { return to.empty(); }
  /// Returns the captures that both sides have (all of `from`, if the rule drops), sorted. The rule
  /// is applied once for each combination of their values.
  std::vector<std::string> shared_captures() const;
};

/// What happens to tensors that no rule names: an error, or they keep their names.
enum class Rest { refuse, keep };

/// The rules of a recipe or of its inverse, with all expressions evaluated to numbers.
struct Rules {
  std::string path;
  std::vector<Rule> rules{};
  Rest rest = Rest::refuse;
  Wrappers wrappers{};  // removed from all names before rules are applied; none in the inverse
};

/// A side of a recipe's rules, or none.
enum class Side { none, from, to };

/// The content of a recipe's file.
struct Recipe::Parsed {
  std::string text;
  std::string path;
  std::map<std::string, VariableRule> variables{};
  Rest rest = Rest::refuse;
  Wrappers wrappers{};
  Side megatron = Side::none;  // the side with the names of Megatron's models
  Value::List rules{};
};

/// Gives the code in src/recipe access to the parsed content of a Recipe.
class RecipeAccess {
 public:
  static const Recipe::Parsed& parsed(const Recipe& recipe) { return *recipe.parsed_; }
  static Recipe make(Recipe::Parsed parsed);
};

/// Evaluates all numbers of a recipe, and returns its rules, or the inverse rules if the options
/// ask for them.
/// Throws: Error(mismatch) naming the rule; Error(invalid_argument) for an unknown variable.
Rules rules_of(const Recipe& recipe, const RecipeOptions& options);

/// Returns the rules of the inverse. Throws: Error(mismatch) naming a rule that has no inverse.
Rules inverse_of(const Rules& rules);

/// Returns `text` with comments (`// …` and `/* … */`) replaced by spaces.
std::string without_comments(std::string_view text);

}  // namespace tessera::recipe
