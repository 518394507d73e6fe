#include "tessera/recipe/recipe.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <optional>
#include <set>
#include <utility>

#include "base/json.h"
#include "base/python_json.h"
#include "recipe/megatron_names.h"
#include "recipe/megatron_rows.h"
#include "recipe/rules.h"
#include "tessera/base/error.h"

namespace tessera::recipe {
namespace {

constexpr std::uint64_t kMaxFileNbytes = std::uint64_t{4} << 20;
constexpr std::size_t kMaxRules = 4096;
constexpr std::size_t kMaxNames = 256;
constexpr std::size_t kMaxOperations = 64;
constexpr std::size_t kMaxVariables = 256;
constexpr std::size_t kMaxSizes = 4096;
constexpr std::size_t kMaxWrappers = 64;
constexpr int kMaxJsonDepth = 16;

/// Reads members of the recipe's JSON. Errors name the rule.
class RecipeJson {
 public:
  RecipeJson(const std::string& path, std::string where) : path_(path), where_(std::move(where)) {}

  const std::string& path() const { return path_; }
  const std::string& where() const { return where_; }
  RecipeJson at(const std::string& what) const { return {path_, where_ + ", " + what}; }

  [[noreturn]] void refuse(std::string_view expected, std::string_view found) const {
    throw Error::expected(ErrorKind::corruption, {.path = path_}, where_, expected, found);
  }
  const Value::Dict& object(const Value& value,
                            std::initializer_list<std::string_view> keys) const {
    const auto* dict = value.get_if<Value::Dict>();
    if (dict == nullptr) refuse("an object", value_to_string(value));
    for (const auto& [key, member] : *dict) {
      const auto* name = key.get_if<std::string>();
      if (name != nullptr && std::ranges::find(keys, *name) != keys.end()) continue;
      std::string expected;
      for (const std::string_view known : keys) {
        expected += (expected.empty() ? "a member of " : ", ") + std::string(known);
      }
      refuse(expected, value_to_string(key));
    }
    return *dict;
  }
  std::string text(const Value& value, std::string_view expected) const {
    const auto* text = value.get_if<std::string>();
    if (text == nullptr) refuse(expected, value_to_string(value));
    return *text;
  }
  /// Returns the items of a list. A value that is not a list counts as a list with one item.
  std::vector<Value> items(const Value& value, std::size_t max_items,
                           std::size_t min_items = 0) const {
    const auto* list = value.get_if<Value::List>();
    if (list == nullptr) return {value};
    if (list->size() < min_items || list->size() > max_items) {
      refuse(std::to_string(min_items) + " to " + std::to_string(max_items) + " items",
             std::to_string(list->size()));
    }
    return *list;
  }

 private:
  const std::string& path_;
  std::string where_;
};

/// Returns the value of an expression in a rule. Recipe::parse, which checks only the form of the
/// recipe, passes a function that returns 1 for every expression.
using Evaluate = std::function<std::int64_t(const Expression&)>;

Expression expression_of(const RecipeJson& json, const Value& value) {
  if (const auto* number = value.get_if<std::int64_t>()) {
    return {std::to_string(*number), json.where()};
  }
  return {json.text(value, "a number, or a text such as \"heads * d\""), json.where()};
}

/// Reads the operations of one rule.
class OperationParser {
 public:
  OperationParser(RecipeJson json, const Evaluate& evaluate, std::size_t num_from,
                  std::size_t num_to)
      : json_(std::move(json)), evaluate_(evaluate), num_streams_(num_from), num_to_(num_to) {}

  std::vector<Operation> parse(const Value& value) {
    std::vector<Operation> operations;
    for (const Value& item : json_.items(value, kMaxOperations)) {
      const auto* dict = item.get_if<Value::Dict>();
      if (dict == nullptr || dict->size() != 1) {
        json_.refuse("operations such as {\"concat\": 0}", value_to_string(item));
      }
      const std::string name = json_.text(dict->front().first, "the name of an operation");
      operations.push_back(parse_one(name, json_.at(name), dict->front().second));
    }
    return operations;
  }
  std::size_t num_streams() const { return num_streams_; }

 private:
  Operation parse_one(const std::string& name, const RecipeJson& json, const Value& value) {
    if (name == "concat") return concat(json, value);
    if (name == "split") return split(json, value);
    if (name == "concat_grouped") return concat_grouped(json, value);
    if (name == "split_grouped") return split_grouped(json, value);
    if (name == "stack") return over_capture<Stack>(json, value);
    if (name == "unstack") return over_capture<Unstack>(json, value);
    if (name == "reshape") return reshape(json, value);
    if (name == "unflatten") return inner_sizes<Unflatten>(json, value);
    if (name == "flatten") return inner_sizes<Flatten>(json, value);
    if (name == "permute") return Permute{numbers(json, value)};
    if (name == "transpose") return transpose(json, value);
    if (name == "slice") return slice(json, value);
    if (name == "pad") return padding<Pad>(json, value);
    if (name == "unpad") return padding<Unpad>(json, value);
    if (name == "duplicate") return Duplicate{fork(json, literal_count(json, value))};
    if (name == "merge_equal") return MergeEqual{join()};
    if (name == "add") return Add{real(json, value)};
    json_.refuse(
        "concat, split, concat_grouped, split_grouped, stack, unstack, reshape, unflatten, "
        "flatten, "
        "permute, transpose, slice, pad, unpad, duplicate, merge_equal or add",
        "'" + printable(name) + "'");
  }

  std::int64_t number(const RecipeJson& json, const Value& value) const {
    return evaluate_(expression_of(json, value));
  }
  std::vector<std::int64_t> numbers(const RecipeJson& json, const Value& value) const {
    std::vector<std::int64_t> result;
    for (const Value& item : json.items(value, kMaxSizes)) result.push_back(number(json, item));
    return result;
  }
  double real(const RecipeJson& json, const Value& value) const {
    if (const auto* whole = value.get_if<std::int64_t>()) return static_cast<double>(*whole);
    const auto* real = value.get_if<double>();
    if (real == nullptr) json.refuse("a number", value_to_string(value));
    return *real;
  }
  /// Returns the member of that name as a number; `otherwise` if the member is missing.
  std::int64_t member(const RecipeJson& json, const Value& value, std::string_view key,
                      std::optional<std::int64_t> otherwise = {}) const {
    const Value* found = value.find(key);
    if (found == nullptr && otherwise) return *otherwise;
    if (found == nullptr) json.refuse("a member \"" + std::string(key) + "\"", "none");
    return number(json.at(std::string(key)), *found);
  }
  std::int64_t dim_member(const RecipeJson& json, const Value& value) const {
    if (value.is<Value::Dict>()) return member(json, value, "dim", 0);
    return number(json, value);
  }
  std::vector<std::int64_t> sizes_member(const RecipeJson& json, const Value& value,
                                         bool is_needed) const {
    const Value* found = value.find("sizes");
    if (found != nullptr) return numbers(json.at("sizes"), *found);
    if (is_needed) json.refuse("a member \"sizes\"", "none");
    return {};
  }
  std::size_t literal_count(const RecipeJson& json, const Value& value) const {
    const auto* count = value.get_if<std::int64_t>();
    if (count == nullptr || *count < 1 || *count > static_cast<std::int64_t>(kMaxNames)) {
      json.refuse("a number from 1 to " + std::to_string(kMaxNames), value_to_string(value));
    }
    return static_cast<std::size_t>(*count);
  }

  std::size_t join() { return std::exchange(num_streams_, 1); }
  std::size_t fork(const RecipeJson& json, std::size_t num_parts) {
    if (num_streams_ != 1) {
      json.refuse("one tensor to split", std::to_string(num_streams_));
    }
    if (num_parts > kMaxNames) json.refuse("at most 256 parts", std::to_string(num_parts));
    return num_streams_ = num_parts;
  }
  std::size_t fork_by_sizes(const RecipeJson& json, const std::vector<std::int64_t>& sizes) {
    return fork(json, sizes.empty() ? num_to_ : sizes.size());
  }
  std::size_t join_by_sizes(const RecipeJson& json, const std::vector<std::int64_t>& sizes) {
    if (!sizes.empty() && sizes.size() != num_streams_) {
      json.refuse(std::to_string(num_streams_) + " sizes", std::to_string(sizes.size()));
    }
    return join();
  }

  Operation concat(const RecipeJson& json, const Value& value) {
    if (value.is<Value::Dict>()) json.object(value, {"dim", "sizes"});
    Concat op{dim_member(json, value), sizes_member(json, value, false), 0};
    op.num_parts = join_by_sizes(json, op.sizes);
    return op;
  }
  Operation split(const RecipeJson& json, const Value& value) {
    if (value.is<Value::Dict>()) json.object(value, {"dim", "sizes"});
    Split op{dim_member(json, value), sizes_member(json, value, false), 0};
    op.num_parts = fork_by_sizes(json, op.sizes);
    return op;
  }
  Operation concat_grouped(const RecipeJson& json, const Value& value) {
    json.object(value, {"dim", "groups", "sizes"});
    ConcatGrouped op{member(json, value, "dim", 0), member(json, value, "groups"),
                     sizes_member(json, value, true), 0};
    op.num_parts = join_by_sizes(json, op.sizes);
    return op;
  }
  Operation split_grouped(const RecipeJson& json, const Value& value) {
    json.object(value, {"dim", "groups", "sizes"});
    SplitGrouped op{member(json, value, "dim", 0), member(json, value, "groups"),
                    sizes_member(json, value, true), 0};
    op.num_parts = fork_by_sizes(json, op.sizes);
    return op;
  }
  template <class Op>
  Operation over_capture(const RecipeJson& json, const Value& value) const {
    if (!value.is<Value::Dict>()) return Op{json.text(value, "the name of a capture"), 0};
    json.object(value, {"over", "dim"});
    const Value* over = value.find("over");
    if (over == nullptr) json.refuse("a member \"over\"", "none");
    return Op{json.text(*over, "the name of a capture"), member(json, value, "dim", 0)};
  }
  Operation reshape(const RecipeJson& json, const Value& value) const {
    json.object(value, {"from", "to"});
    const Value* from = value.find("from");
    const Value* to = value.find("to");
    if (from == nullptr || to == nullptr)
      json.refuse("members \"from\" and \"to\"", "at most one of them");
    return Reshape{numbers(json.at("from"), *from), numbers(json.at("to"), *to)};
  }
  template <class Op>
  Operation inner_sizes(const RecipeJson& json, const Value& value) const {
    json.object(value, {"dim", "sizes"});
    const std::int64_t dim = member(json, value, "dim", 0);
    if (dim < 0) json.refuse("a \"dim\" of 0 or more", std::to_string(dim));
    return Op{dim, sizes_member(json, value, true)};
  }
  Operation transpose(const RecipeJson& json, const Value& value) const {
    const std::vector<std::int64_t> dims = numbers(json, value);
    if (dims.size() != 2) json.refuse("two dimensions", std::to_string(dims.size()));
    return Transpose{dims[0], dims[1]};
  }
  Operation slice(const RecipeJson& json, const Value& value) const {
    json.object(value, {"dim", "begin", "end"});
    return Slice{member(json, value, "dim", 0), member(json, value, "begin", 0),
                 member(json, value, "end")};
  }
  template <class Op>
  Operation padding(const RecipeJson& json, const Value& value) const {
    json.object(value, {"dim", "from", "to", "value"});
    Op op{
        member(json, value, "dim", 0), member(json, value, "from"), member(json, value, "to"), {}};
    if (const Value* filling = value.find("value")) {
      const auto* word = filling->get_if<std::string>();
      op.filling.is_any = word != nullptr && *word == "any";
      if (word != nullptr && !op.filling.is_any) {
        json.at("value").refuse("a number or \"any\"", "'" + printable(*word) + "'");
      }
      if (word == nullptr) op.filling.value = real(json.at("value"), *filling);
    }
    return op;
  }

  RecipeJson json_;
  const Evaluate& evaluate_;
  std::size_t num_streams_;  // number of streams before the next operation
  std::size_t num_to_;
};

std::vector<NameTemplate> parse_names(const RecipeJson& json, const Value& value,
                                      const Evaluate& evaluate) {
  const auto value_of = [&](std::string_view variable) {
    return evaluate({std::string(variable), json.where()});
  };
  std::vector<NameTemplate> names;
  for (const Value& item : json.items(value, kMaxNames, 1)) {
    auto parsed = NameTemplate::parse(json.text(item, "a name"), value_of);
    if (const auto* problem = std::get_if<NameTemplate::Problem>(&parsed)) {
      json.refuse(problem->expected, problem->found);
    }
    names.push_back(std::get<NameTemplate>(std::move(parsed)));
  }
  return names;
}

const Capture* find_capture(const std::vector<NameTemplate>& names, const std::string& capture) {
  const Capture* found = nullptr;
  for (const NameTemplate& name : names) {
    const Capture* here = name.find(capture);
    if (here != nullptr && (found == nullptr || here->has_kind)) found = here;
  }
  return found;
}

std::set<std::string> captures_of(const std::vector<NameTemplate>& names) {
  std::set<std::string> captures;
  for (const NameTemplate& name : names) {
    captures.insert(name.captures().begin(), name.captures().end());
  }
  return captures;
}

/// Returns whether two captures of the same name can be in one rule: they have the same kind,
/// number of words and range.
bool are_of_one_kind(const Capture& a, const Capture& b) {
  return a.kind == b.kind && a.words.size() == b.words.size() && a.range == b.range;
}

[[noreturn]] void refuse_two_kinds(const RecipeJson& json, const std::string& capture) {
  json.refuse("{" + capture +
                  "} of one kind in all names, with the same number of words and the same range",
              "two kinds");
}

/// Checks that the captures in `name` with the same name as `kind` also have its kind, its number
/// of words and its range.
void require_kind(const RecipeJson& json, const NameTemplate& name, const Capture& kind) {
  for (const auto& part : name.parts()) {
    const auto* capture = std::get_if<Capture>(&part);
    if (capture == nullptr || capture->name != kind.name) continue;
    if (!are_of_one_kind(*capture, kind)) refuse_two_kinds(json, kind.name);
  }
}

/// Completes captures that are written without a kind, such as `{p}`: they get the kind that the
/// other side of the rule writes, such as `{p:gate|up}`. If only one side has a capture with words,
/// replaces each name on that side by several names, one for each word.
void resolve_captures(const RecipeJson& json, std::vector<NameTemplate>& side,
                      const std::vector<NameTemplate>& other) {
  for (const std::string& capture : captures_of(side)) {
    const Capture* own = find_capture(side, capture);
    const Capture* opposite = find_capture(other, capture);
    const Capture kind = !own->has_kind && opposite != nullptr ? *opposite : *own;
    for (NameTemplate& name : side) {
      if (name.find(capture) != nullptr) name = name.with_kind(kind);
      require_kind(json, name, kind);
    }
    if (kind.kind != CaptureKind::alternatives || opposite != nullptr) continue;
    std::vector<NameTemplate> expanded;
    for (const NameTemplate& name : side) {
      if (name.find(capture) == nullptr) {
        expanded.push_back(name);
        continue;
      }
      for (std::size_t w = 0; w < kind.words.size(); ++w) {
        expanded.push_back(name.with_word(capture, w));
      }
    }
    if (expanded.size() > kMaxNames)
      json.refuse("at most 256 names", std::to_string(expanded.size()));
    side = std::move(expanded);
  }
}

/// Checks that each capture of a name has the same kind, number of words and range in all names of
/// the rule.
void check_kinds(const RecipeJson& json, const Rule& rule, const NameTemplate& name) {
  for (const std::string& capture : name.captures()) {
    const Capture* here = name.find(capture);
    for (const auto* side : {&rule.from, &rule.to}) {
      for (const NameTemplate& other : *side) {
        const Capture* there = other.find(capture);
        if (there != nullptr && !are_of_one_kind(*there, *here)) refuse_two_kinds(json, capture);
      }
    }
  }
}

/// Checks that a rule's names can be read in only one way, and that the captures of both sides fit.
void check_names(const RecipeJson& json, const Rule& rule) {
  for (const auto* side : {&rule.from, &rule.to}) {
    for (const NameTemplate& name : *side) {
      if (const auto problem = name.ambiguity()) json.refuse(problem->expected, problem->found);
      if (name.captures() != side->front().captures()) {
        json.refuse(
            "the same captures in all names of one side",
            "'" + printable(side->front().text()) + "' and '" + printable(name.text()) + "'");
      }
    }
  }
  if (rule.drops()) return;
  for (const auto* side : {&rule.from, &rule.to}) {
    for (const NameTemplate& name : *side) check_kinds(json, rule, name);
  }
}

/// Checks the captures that only one side has. They must be numbers. The operations must stack once
/// each capture that only `from` has, and unstack once each capture that only `to` has.
void check_stacks(const RecipeJson& json, const Rule& rule) {
  std::set<std::string> live(rule.from.front().captures().begin(),
                             rule.from.front().captures().end());
  const std::vector<std::string> shared = rule.shared_captures();
  for (const Operation& operation : rule.operations) {
    const auto check = [&](const std::string& capture, const std::vector<NameTemplate>& side,
                           const char* where) {
      const Capture* found = find_capture(side, capture);
      const bool is_shared = std::ranges::find(shared, capture) != shared.end();
      if (found != nullptr && !is_shared && found->kind == CaptureKind::number) return;
      json.refuse(std::string("a number capture that is only in \"") + where + "\"",
                  "{" + capture + "}");
    };
    if (const auto* op = std::get_if<Stack>(&operation)) {
      check(op->capture, rule.from, "from");
      if (live.erase(op->capture) == 0) json.refuse("one stack of {" + op->capture + "}", "two");
    }
    if (const auto* op = std::get_if<Unstack>(&operation)) {
      check(op->capture, rule.to, "to");
      if (!live.insert(op->capture).second) {
        json.refuse("one unstack of {" + op->capture + "}", "two");
      }
    }
  }
  const std::set<std::string> needed(rule.to.front().captures().begin(),
                                     rule.to.front().captures().end());
  if (live == needed) return;
  const auto in_words = [](const std::set<std::string>& captures) {
    std::string text;
    for (const std::string& capture : captures)
      text += (text.empty() ? "{" : ", {") + capture + "}";
    return text.empty() ? std::string("none") : text;
  };
  json.refuse("\"to\" with the captures that remain after the operations: " + in_words(live),
              in_words(needed));
}

Rule parse_rule(const RecipeJson& json, const Value& value, std::size_t number,
                const Evaluate& evaluate) {
  json.object(value, {"from", "to", "ops", "optional", "note"});
  Rule rule{.number = number};
  const Value* from = value.find("from");
  if (from == nullptr) json.refuse("a member \"from\"", "none");
  rule.from = parse_names(json.at("from"), *from, evaluate);
  if (const Value* to = value.find("to")) rule.to = parse_names(json.at("to"), *to, evaluate);
  if (const Value* optional = value.find("optional")) {
    const auto* flag = optional->get_if<bool>();
    if (flag == nullptr) json.at("optional").refuse("true or false", value_to_string(*optional));
    rule.is_optional = *flag;
  }
  const std::vector<NameTemplate> from_as_written = rule.from;
  resolve_captures(json.at("from"), rule.from, rule.drops() ? rule.from : rule.to);
  resolve_captures(json.at("to"), rule.to, from_as_written);
  check_names(json, rule);
  const Value* ops = value.find("ops");
  if (rule.drops()) {
    if (ops != nullptr) json.refuse("no operations in a rule that drops", "\"ops\"");
    return rule;
  }
  OperationParser parser(json, evaluate, rule.from.size(), rule.to.size());
  if (ops != nullptr) rule.operations = parser.parse(*ops);
  if (parser.num_streams() != rule.to.size()) {
    json.refuse("in \"to\" one name for each tensor that remains after the operations, in total " +
                    std::to_string(parser.num_streams()),
                std::to_string(rule.to.size()));
  }
  check_stacks(json, rule);
  return rule;
}

std::vector<Rule> parse_rules(const std::string& path, const Value::List& rules,
                              const Evaluate& evaluate) {
  std::vector<Rule> parsed;
  for (std::size_t i = 0; i < rules.size(); ++i) {
    const RecipeJson json(path, "rule " + std::to_string(i + 1));
    parsed.push_back(parse_rule(json, rules[i], i + 1, evaluate));
  }
  return parsed;
}

Wrappers parse_wrappers(const RecipeJson& json, const Value& value) {
  std::vector<std::string> components;
  for (const Value& item : json.items(value, kMaxWrappers)) {
    constexpr const char* kExpected = "names of modules without dots, such as _orig_mod";
    components.push_back(json.text(item, kExpected));
    const std::string& name = components.back();
    if (name.empty() || name.find_first_of(".{}") != std::string::npos) {
      json.refuse(kExpected, "'" + printable(name) + "'");
    }
  }
  return Wrappers(std::move(components));
}

VariableRule parse_variable(const RecipeJson& json, const Value& value) {
  VariableRule rule;
  if (!value.is<Value::Dict>()) {
    rule.expression = expression_of(json, value);
    return rule;
  }
  json.object(value, {"config", "else"});
  if (const Value* config = value.find("config")) {
    for (const Value& key : json.at("config").items(*config, kMaxNames)) {
      rule.config_keys.push_back(json.at("config").text(key, "a key of config.json"));
    }
  }
  if (const Value* otherwise = value.find("else")) {
    rule.expression = expression_of(json.at("else"), *otherwise);
  }
  return rule;
}

}  // namespace

std::vector<std::string> Rule::shared_captures() const {
  std::vector<std::string> shared;
  if (to.empty()) return from.front().captures();
  std::ranges::set_intersection(from.front().captures(), to.front().captures(),
                                std::back_inserter(shared));
  return shared;
}

std::string without_comments(std::string_view text) {
  std::string result(text);
  bool in_text = false;
  for (std::size_t i = 0; i < result.size(); ++i) {
    if (in_text) {
      if (result[i] == '\\') {
        ++i;
      } else if (result[i] == '"') {
        in_text = false;
      }
      continue;
    }
    in_text = result[i] == '"';
    if (result[i] != '/' || i + 1 == result.size()) continue;
    std::size_t end = 0;
    if (result[i + 1] == '/') {
      end = std::min(result.find('\n', i), result.size());
    } else if (result[i + 1] == '*') {
      const std::size_t close = result.find("*/", i + 2);
      if (close == std::string::npos)
        return result;  // no comment: the JSON parser will refuse the '/'
      end = close + 2;
    } else {
      continue;  // no comment: the JSON parser will refuse the '/'
    }
    for (; i < end; ++i) {
      if (result[i] != '\n') result[i] = ' ';
    }
    --i;
  }
  return result;
}

Recipe RecipeAccess::make(Recipe::Parsed parsed) {
  return Recipe(std::make_shared<const Recipe::Parsed>(std::move(parsed)));
}

Recipe Recipe::parse(std::string_view text, const std::string& path) {
  const Value root = parse_json(without_comments(text), path,
                                {.max_depth = kMaxJsonDepth, .max_nbytes = kMaxFileNbytes});
  const RecipeJson json(path, "recipe");
  json.object(root, {"schema", "rest", "unwrap", "megatron", "variables", "rules", "note"});
  Parsed parsed{.text = std::string(text), .path = path};
  const Value* schema = root.find("schema");
  if (schema == nullptr || *schema != Value(1)) {
    json.at("schema").refuse("1", schema == nullptr ? "none" : value_to_string(*schema));
  }
  if (const Value* rest = root.find("rest")) {
    const std::string word = json.at("rest").text(*rest, "\"keep\" or \"refuse\"");
    if (word != "keep" && word != "refuse") {
      json.at("rest").refuse("\"keep\" or \"refuse\"", "'" + printable(word) + "'");
    }
    parsed.rest = word == "keep" ? Rest::keep : Rest::refuse;
  }
  if (const Value* megatron = root.find("megatron")) {
    const std::string word = json.at("megatron").text(*megatron, "\"from\" or \"to\"");
    if (word != "from" && word != "to") {
      json.at("megatron").refuse("\"from\" or \"to\"", "'" + printable(word) + "'");
    }
    parsed.megatron = word == "from" ? Side::from : Side::to;
  }
  if (const Value* unwrap = root.find("unwrap")) {
    parsed.wrappers = parse_wrappers(json.at("unwrap"), *unwrap);
  }
  if (const Value* variables = root.find("variables")) {
    const auto* dict = variables->get_if<Value::Dict>();
    if (dict == nullptr || dict->size() > kMaxVariables) {
      json.at("variables").refuse("an object of at most 256 members", value_to_string(*variables));
    }
    for (const auto& [key, value] : *dict) {
      const std::string name = json.text(key, "a name");
      VariableRule rule = parse_variable(RecipeJson(path, "variable " + printable(name)), value);
      if (rule.expression) check_expression(*rule.expression, path);
      parsed.variables.emplace(name, std::move(rule));
    }
  }
  const Value* rules = root.find("rules");
  const auto* list = rules == nullptr ? nullptr : rules->get_if<Value::List>();
  if (list == nullptr || list->size() > kMaxRules) {
    json.at("rules").refuse("a list of at most 4096 rules",
                            rules == nullptr ? "none" : value_to_string(*rules));
  }
  parsed.rules = *list;
  parse_rules(path, parsed.rules, [&](const Expression& expression) -> std::int64_t {
    for (const std::string& name : check_expression(expression, path)) {
      if (parsed.variables.contains(name)) continue;
      throw Error::expected(ErrorKind::corruption, {.path = path}, expression.where,
                            "a name in \"variables\"", "'" + printable(name) + "'");
    }
    return 1;
  });
  return RecipeAccess::make(std::move(parsed));
}

Recipe Recipe::read(const FileSystem& fs, const std::string& path) {
  return parse(read_file(fs, path, kMaxFileNbytes), path);
}

const std::string& Recipe::text() const {
  return parsed_->text;
}
const std::string& Recipe::path() const {
  return parsed_->path;
}
std::vector<std::string> Recipe::variables() const {
  std::vector<std::string> names;
  for (const auto& [name, rule] : parsed_->variables) names.push_back(name);
  return names;
}

Rules rules_of(const Recipe& recipe, const RecipeOptions& options) {
  const auto& parsed = RecipeAccess::parsed(recipe);
  Variables variables(parsed.path, parsed.variables, options.variables, options.config,
                      options.config_path);
  Rules rules{.path = parsed.path, .rules = {}, .rest = parsed.rest, .wrappers = parsed.wrappers};
  rules.rules = parse_rules(parsed.path, parsed.rules, [&](const Expression& expression) {
    return variables.evaluate(expression);
  });
  return options.direction == Direction::forward ? rules : inverse_of(rules);
}

Rules inverse_of(const Rules& rules) {
  Rules back{.path = rules.path, .rules = {}, .rest = rules.rest};
  for (const Rule& rule : rules.rules) {
    if (rule.drops()) continue;  // the inverse cannot make dropped tensors
    Rule inverse{rule.number, rule.to, rule.from, {}, rule.is_optional};
    for (auto op = rule.operations.rbegin(); op != rule.operations.rend(); ++op) {
      try {
        inverse.operations.push_back(inverse_of(*op));
      } catch (const ShapeProblem& problem) {
        throw Error::expected(ErrorKind::mismatch, {.path = rules.path},
                              rule_name(rule.number) + ", " + std::string(operation_name(*op)),
                              problem.expected, problem.found);
      }
    }
    back.rules.push_back(std::move(inverse));
  }
  return back;
}

void add_setting(RecipeOptions& options, std::string_view text) {
  constexpr std::string_view kPrefix = "prefix=";
  if (text.starts_with(kPrefix)) {
    options.prefix = text.substr(kPrefix.size());
    return;
  }
  const std::size_t equals = text.find('=');
  std::int64_t number = 0;
  const std::string_view digits = equals == std::string_view::npos ? "" : text.substr(equals + 1);
  const auto [end, code] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (equals == 0 || digits.empty() || code != std::errc{} ||
      end != digits.data() + digits.size()) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "variable", "NAME=NUMBER",
                          "'" + printable(text) + "'");
  }
  options.variables[std::string(text.substr(0, equals))] = number;
}

std::string identity_text(const Recipe& recipe, const RecipeOptions& options) {
  std::string text = recipe.text() + "\n" + value_to_json(options.config);
  for (const MegatronArguments& of_source : options.megatron_arguments) {
    text += of_source.unread.empty() ? "\nsource" : "\nsource with unread arguments";
    for (const auto& [name, number] : of_source.numbers) {
      text += "\n" + name + "=" + std::to_string(number);
    }
  }
  return text;
}

namespace {

struct Config {
  Value content;
  std::string path;
};

/// Returns the `config.json` in the folder of a checkpoint, which may be a file; nothing without
/// such a file, or if `place` is empty.
std::optional<Config> config_beside(const FileSystem& fs, const std::string& place) {
  constexpr std::uint64_t kMaxConfigNbytes = std::uint64_t{16} << 20;
  if (place.empty()) return std::nullopt;
  const bool is_directory = fs.kind_of(place) == FileKind::directory;
  const std::size_t slash = place.rfind('/');
  const std::string folder = is_directory                 ? place
                             : slash == std::string::npos ? "."
                                                          : place.substr(0, slash + 1);
  const std::string path = join_path(folder, "config.json");
  if (fs.kind_of(path) != FileKind::regular) return std::nullopt;
  return Config{parse_python_json(read_file(fs, path, kMaxConfigNbytes), path), path};
}

/// Returns the value of a variable; nothing if `config` does not give it.
std::optional<std::int64_t> value_in(const Recipe& recipe, const RecipeOptions& options,
                                     const Config& config, const std::string& name) {
  const auto& parsed = RecipeAccess::parsed(recipe);
  try {
    Variables variables(parsed.path, parsed.variables, options.variables, config.content,
                        config.path);
    return variables.evaluate({name, "variable " + name});
  } catch (const Error&) {
    return std::nullopt;  // if the recipe needs it, applying the recipe reports this
  }
}

/// Returns the first variable that `own` gives another value than `options.config`.
std::optional<Error> find_difference(const Recipe& recipe, const RecipeOptions& options,
                                     const std::optional<Config>& own) {
  if (!own || own->path == options.config_path) return std::nullopt;
  for (const auto& [name, rule] : RecipeAccess::parsed(recipe).variables) {
    if (rule.config_keys.empty() || options.variables.contains(name)) continue;
    const auto expected = value_in(recipe, options, {options.config, options.config_path}, name);
    const auto found = value_in(recipe, options, *own, name);
    if (!expected || !found || *expected == *found) continue;
    return Error::expected(
        ErrorKind::mismatch, {.path = own->path}, "variable " + name,
        std::to_string(*expected) + (options.config_path.empty()
                                         ? ", as for the first source, which has no config.json"
                                         : ", as in " + printable(options.config_path)),
        std::to_string(*found),
        "apply the recipe to each source by itself, or give " + name +
            "=N as a variable of the recipe");
  }
  return std::nullopt;
}

}  // namespace

void read_config(const FileSystem& fs, const Recipe& recipe,
                 const std::vector<std::string>& checkpoints, const std::string& model_folder,
                 RecipeOptions& options) {
  const std::string& checkpoint = checkpoints.front();
  const bool is_to = is_to_megatron(recipe, options.direction);
  if (is_to || is_from_megatron(recipe, options.direction)) {
    // Only files are copied from there, so an object in its DCP files does not count.
    if (is_to && !model_folder.empty()) {
      options.megatron_arguments = {
          arguments_in_common_file(fs, model_folder).value_or(MegatronArguments())};
    } else {
      for (const std::string& path : checkpoints) {
        options.megatron_arguments.push_back(path.empty() ? MegatronArguments()
                                                          : arguments_of_checkpoint(fs, path));
      }
    }
  }
  const auto& variables = RecipeAccess::parsed(recipe).variables;
  if (std::ranges::all_of(variables,
                          [](const auto& each) { return each.second.config_keys.empty(); })) {
    return;
  }
  for (const std::string& place : {checkpoint, model_folder}) {
    auto config = config_beside(fs, place);
    if (!config) continue;
    options.config = std::move(config->content);
    options.config_path = std::move(config->path);
    break;
  }
  if (checkpoints.size() == 1) return;
  for (const std::string& each : checkpoints) {
    options.config_differences.push_back(find_difference(recipe, options, config_beside(fs, each)));
  }
}

}  // namespace tessera::recipe
