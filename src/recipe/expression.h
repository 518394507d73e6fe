#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/value.h"

namespace tessera::recipe {

/// The text of a number in a recipe: `128`, `kv_heads`, `hidden / heads`, `(q + 2) * d`.
struct Expression {
  std::string text;
  std::string where;  // place in the recipe, for errors: `rule 3, split.sizes`
};

/// Where a variable of a recipe gets its value from.
struct VariableRule {
  std::vector<std::string> config_keys{};  // of config.json: `a.b`; the first one found counts
  std::optional<Expression> expression{};  // used if config.json has none of the keys
};

/// The values of variables and expressions. Not thread-safe.
class Variables {
 public:
  /// `given`: the user's values, which come first. `config` is None without a config.json. The
  /// paths are for errors. Throws: Error(invalid_argument) if no rule has a name of `given`.
  Variables(std::string path, std::map<std::string, VariableRule> rules,
            std::map<std::string, std::int64_t> given, Value config, std::string config_path);

  /// Returns the value of an expression. Throws, naming the place or the variable: Error(mismatch)
  /// if a variable has no value or a quotient is not whole; Error(corruption) for a cycle.
  std::int64_t evaluate(const Expression& expression);

 private:
  std::int64_t value_of(const std::string& name, const std::string& where);
  std::optional<std::int64_t> from_config(const VariableRule& rule, const std::string& name) const;

  std::string path_;
  std::map<std::string, VariableRule> rules_;
  std::map<std::string, std::int64_t> known_;
  std::set<std::string> open_;  // variables that are being evaluated
  Value config_;
  std::string config_path_;
};

/// Returns the names of variables in an expression. Throws: Error(corruption) naming `path` if the
/// text is not an expression.
std::set<std::string> check_expression(const Expression& expression, const std::string& path);

}  // namespace tessera::recipe
