#include "recipe/expression.h"

#include <charconv>
#include <utility>

#include "base/checked_math.h"
#include "tessera/base/error.h"

namespace tessera::recipe {
namespace {

constexpr int kMaxDepth = 32;
constexpr std::size_t kMaxNbytes = 512;

/// Reads an expression by recursive descent. `value_of` gives the values of names; without it, the
/// reader checks only the form.
class ExpressionReader {
 public:
  using Lookup = std::function<std::int64_t(const std::string&)>;

  ExpressionReader(const Expression& expression, const std::string& path, Lookup value_of)
      : text_(expression.text),
        expression_(expression),
        path_(path),
        value_of_(std::move(value_of)) {}

  std::int64_t read() {
    if (text_.size() > kMaxNbytes) refuse("at most 512 bytes");
    const std::int64_t value = read_sum(0);
    skip_spaces();
    if (at_ != text_.size()) {
      refuse("an operator at byte " + std::to_string(at_) + ", or nothing more");
    }
    return value;
  }
  std::set<std::string> take_names() { return std::move(names_); }

 private:
  std::int64_t read_sum(int depth) {
    std::int64_t sum = read_product(depth);
    for (char op = next_of("+-"); op != 0; op = next_of("+-")) {
      const std::int64_t right = read_product(depth);
      sum = checked(op == '+' ? checked_add(sum, right) : subtract(sum, right));
    }
    return sum;
  }
  std::int64_t read_product(int depth) {
    std::int64_t product = read_term(depth);
    for (char op = next_of("*/"); op != 0; op = next_of("*/")) {
      const std::int64_t right = read_term(depth);
      product = op == '*' ? checked(checked_mul(product, right)) : divide(product, right);
    }
    return product;
  }
  std::int64_t read_term(int depth) {
    if (depth > kMaxDepth) refuse("at most 32 levels of parentheses");
    if (next_of("-") != 0) return checked(subtract(0, read_term(depth + 1)));
    if (next_of("(") != 0) {
      const std::int64_t value = read_sum(depth + 1);
      if (next_of(")") == 0) refuse("a ')'");
      return value;
    }
    const std::size_t begin = at_;
    while (at_ < text_.size() && is_word(text_[at_])) ++at_;
    const std::string_view word = text_.substr(begin, at_ - begin);
    if (word.empty()) refuse("a number or a name at byte " + std::to_string(begin));
    if (word[0] < '0' || word[0] > '9') {
      names_.emplace(word);
      return value_of_ ? value_of_(std::string(word)) : 1;
    }
    std::int64_t number = 0;
    const auto [end, code] = std::from_chars(word.data(), word.data() + word.size(), number);
    if (code != std::errc{} || end != word.data() + word.size()) refuse("a number below 2^63");
    return number;
  }

  std::int64_t divide(std::int64_t left, std::int64_t right) const {
    if (!value_of_) return 1;
    if (right <= 0 || left < 0 || left % right != 0) {
      throw Error::expected(ErrorKind::mismatch, {.path = path_}, expression_.where,
                            "a whole number as the result of '" + printable(text_) + "'",
                            std::to_string(left) + " / " + std::to_string(right));
    }
    return left / right;
  }
  static std::optional<std::int64_t> subtract(std::int64_t left, std::int64_t right) {
    std::int64_t difference{};
    if (__builtin_sub_overflow(left, right, &difference)) return std::nullopt;
    return difference;
  }
  std::int64_t checked(std::optional<std::int64_t> value) const {
    if (!value_of_) return 1;
    if (!value) {
      throw Error::expected(ErrorKind::mismatch, {.path = path_}, expression_.where,
                            "a number below 2^63", "'" + printable(text_) + "', which is larger");
    }
    return *value;
  }
  [[noreturn]] void refuse(const std::string& expected) const {
    throw Error::expected(ErrorKind::corruption, {.path = path_}, expression_.where, expected,
                          "'" + printable(text_) + "'");
  }
  void skip_spaces() {
    while (at_ < text_.size() && text_[at_] == ' ') ++at_;
  }
  /// If the next character is one of `wanted`, moves past it and returns it; else returns 0.
  char next_of(std::string_view wanted) {
    skip_spaces();
    if (at_ == text_.size() || wanted.find(text_[at_]) == std::string_view::npos) return 0;
    return text_[at_++];
  }
  static bool is_word(char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
  }

  std::string_view text_;
  const Expression& expression_;
  const std::string& path_;
  Lookup value_of_;
  std::size_t at_ = 0;
  std::set<std::string> names_;
};

const Value* find_key(const Value& config, std::string_view dotted) {
  const Value* found = &config;
  while (found != nullptr && !dotted.empty()) {
    const std::size_t end = std::min(dotted.find('.'), dotted.size());
    found = found->find(dotted.substr(0, end));
    dotted.remove_prefix(std::min(end + 1, dotted.size()));
  }
  return found;
}

}  // namespace

Variables::Variables(std::string path, std::map<std::string, VariableRule> rules,
                     std::map<std::string, std::int64_t> given, Value config,
                     std::string config_path)
    : path_(std::move(path)),
      rules_(std::move(rules)),
      known_(std::move(given)),
      config_(std::move(config)),
      config_path_(std::move(config_path)) {
  for (const auto& [name, value] : known_) {
    if (rules_.contains(name)) continue;
    std::string names;
    for (const auto& [known, rule] : rules_) names += (names.empty() ? "" : ", ") + known;
    throw Error::expected(
        ErrorKind::invalid_argument, {.path = path_}, "variable",
        names.empty() ? "no variable, because the recipe has none" : "one of " + names,
        "'" + printable(name) + "'");
  }
}

std::int64_t Variables::evaluate(const Expression& expression) {
  return ExpressionReader(expression, path_,
                          [&](const std::string& name) { return value_of(name, expression.where); })
      .read();
}

std::int64_t Variables::value_of(const std::string& name, const std::string& where) {
  if (const auto known = known_.find(name); known != known_.end()) return known->second;
  const auto rule = rules_.find(name);
  if (rule == rules_.end()) {
    throw Error::expected(ErrorKind::corruption, {.path = path_}, where, "a name in \"variables\"",
                          "'" + printable(name) + "'");
  }
  if (!open_.insert(name).second) {
    throw Error::expected(ErrorKind::corruption, {.path = path_}, "variable " + name,
                          "a value that does not depend on itself", "a cycle");
  }
  if (open_.size() > kMaxDepth) {
    throw Error::expected(ErrorKind::corruption, {.path = path_}, "variable " + name,
                          "a chain of at most " + std::to_string(kMaxDepth) +
                              " variables that need each other's values",
                          "a longer chain");
  }
  std::optional<std::int64_t> value = from_config(rule->second, name);
  if (!value && rule->second.expression) value = evaluate(*rule->second.expression);
  if (!value) {
    std::string expected = "a value";
    for (const std::string& key : rule->second.config_keys) {
      expected +=
          (&key == &rule->second.config_keys.front() ? " from config.json (" : " or ") + key;
    }
    if (!rule->second.config_keys.empty()) expected += ")";
    throw Error::expected(ErrorKind::mismatch, {.path = path_}, "variable " + name, expected,
                          config_.is<Value::None>() ? "no config.json beside the source"
                                                    : "none in " + printable(config_path_),
                          "give " + name + "=N as a variable of the recipe");
  }
  open_.erase(name);
  return known_[name] = *value;
}

std::optional<std::int64_t> Variables::from_config(const VariableRule& rule,
                                                   const std::string& name) const {
  for (const std::string& key : rule.config_keys) {
    const Value* found = find_key(config_, key);
    if (found == nullptr || found->is<Value::None>()) continue;
    if (const auto* number = found->get_if<std::int64_t>()) return *number;
    throw Error::expected(ErrorKind::mismatch, {.path = config_path_}, key,
                          "an int, for variable " + name + " of " + printable(path_),
                          value_to_string(*found));
  }
  return std::nullopt;
}

std::set<std::string> check_expression(const Expression& expression, const std::string& path) {
  ExpressionReader reader(expression, path, {});
  static_cast<void>(reader.read());
  return reader.take_names();
}

}  // namespace tessera::recipe
