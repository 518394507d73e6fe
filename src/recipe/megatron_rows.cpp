#include "recipe/megatron_rows.h"

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <variant>

#include "base/outside_failure.h"
#include "formats/megatron/cuts_by_name.h"
#include "formats/megatron/torch_dist_files.h"
#include "formats/merged_sources.h"
#include "formats/torch_zip.h"
#include "recipe/inputs.h"
#include "recipe/megatron_names.h"
#include "recipe/rule_matcher.h"
#include "reshard/state_key.h"
#include "tessera/base/error.h"

namespace tessera::recipe {
namespace {

using formats::CheckpointContents;
using formats::CheckpointReader;
using formats::Finding;
using formats::ValueEntry;
using Numbers = std::map<std::string, std::int64_t>;

constexpr std::string_view kTurnsOfExperts = "moe_mlp_glu_interleave_size";
constexpr std::string_view kTurnsOfSharedExperts = "moe_shared_expert_glu_interleave_size";
constexpr std::string_view kTensorRanks = "tensor_model_parallel_size";
constexpr std::string_view kTensorRanksOfExperts = "expert_tensor_parallel_size";
constexpr std::array kTurns{kTurnsOfExperts, kTurnsOfSharedExperts};
constexpr std::array kTurnsAndRanks{kTurnsOfExperts, kTurnsOfSharedExperts, kTensorRanks,
                                    kTensorRanksOfExperts};
constexpr std::string_view kArgs = "args.";

std::optional<std::int64_t> number_in(const Value& value) {
  const auto* const number = value.get_if<std::int64_t>();
  return number == nullptr ? std::nullopt : std::optional(*number);
}

/// Returns the text before `key` if `name` ends with this component: `run.` in `run.args.rank`.
std::optional<std::string> text_before(std::string_view name, std::string_view key) {
  if (!name.ends_with(key)) return std::nullopt;
  name.remove_suffix(key.size());
  if (!name.empty() && !name.ends_with('.')) return std::nullopt;
  return std::string(name);
}

/// Returns the arguments in the content of Megatron's common object: a dict, in newer versions in a
/// list. Null if there are none.
const Value* arguments_in_object(const Value& object) {
  const auto* const items = object.get_if<Value::List>();
  const Value& state = items != nullptr && items->size() == 1 ? items->front() : object;
  const Value* const args = state.is<Value::Dict>() ? state.find("args") : nullptr;
  return args != nullptr && args->is<Value::Dict>() ? args : nullptr;
}

std::optional<Value> value_unless_refused(const CheckpointReader& reader, std::size_t value) {
  try {
    return reader.read_value(value);
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    return std::nullopt;
  }
}

/// Returns the arguments `names` that are numbers, from values such as `args.<name>` and from the
/// objects that replace `common.pt`. The key is the text before `args.` or the object: the names of
/// the tensors that they are about begin with it. Leaves out an object that cannot be read as a
/// value: `arguments_in_common_object` has read it.
std::map<std::string, Numbers> arguments_in_values(const CheckpointReader& reader,
                                                   std::span<const std::string_view> names) {
  std::map<std::string, Numbers> arguments;
  const auto& values = reader.contents().values;
  for (std::size_t v = 0; v < values.size(); ++v) {
    const std::string& value_name = values[v].name;
    const auto before_object = formats::megatron::before_common_object(value_name);
    for (const std::string_view name : names) {
      auto before = text_before(value_name, std::string(kArgs) + std::string(name));
      if (!before) continue;
      if (before_object) before = *before_object;
      if (const auto number = number_in(reader.read_value(v))) {
        arguments[*before].emplace(name, *number);
      }
    }
    if (!before_object) continue;
    const auto object = value_unless_refused(reader, v);
    const Value* const args = object ? arguments_in_object(*object) : nullptr;
    if (args == nullptr) continue;
    for (const std::string_view name : names) {
      const Value* const value = args->find(name);
      const auto number = value == nullptr ? std::nullopt : number_in(*value);
      if (number) arguments[std::string(*before_object)].emplace(name, *number);
    }
  }
  return arguments;
}

/// Returns the entry whose key is the longest that `name` begins with.
template <class Map>
auto nearest(const Map& by_beginning, const std::string& name) {
  auto found = by_beginning.end();
  for (auto each = by_beginning.begin(); each != by_beginning.end(); ++each) {
    if (name.starts_with(each->first)) found = each;  // a longer key follows a shorter one
  }
  return found;
}

std::int64_t argument(const Numbers& numbers, std::string_view name) {
  const auto found = numbers.find(std::string(name));
  return found == numbers.end() ? 0 : found->second;
}

const RowOrder& order_of(const std::string& name, const RowOrders& orders) {
  return formats::megatron::is_of_expert(name) ? orders.experts : orders.shared_experts;
}

/// Returns operations that put all rows of the gate before those of the up projection; none if the
/// tensor has them so.
std::vector<Operation> operations_for_rows(const std::string& name, const RowOrder& order,
                                           const std::string& path) {
  if (!order.unread.empty()) {
    throw Error::expected(ErrorKind::unsupported, {.path = path, .fqn = name}, "order of rows",
                          "arguments in common.pt, or in the object common_state, that say whether "
                          "rows of the gate and of the up projection take turns",
                          order.unread);
  }
  const std::int64_t turns = order.turns;
  if (turns <= 0) return {};
  if (order.num_ranks > 1) {
    throw Error::expected(ErrorKind::unsupported, {.path = path, .fqn = name}, "order of rows",
                          "one tensor rank, where rows of the gate and of the up projection take "
                          "turns every " +
                              std::to_string(turns) + " rows",
                          std::to_string(order.num_ranks) +
                              " ranks, of which Megatron stores halves with rows of both (load the "
                              "checkpoint with Megatron, and save it with one tensor rank)");
  }
  return {Unflatten{0, {-1, 2, turns}}, Transpose{0, 1}, Flatten{0, {2, -1, turns}}};
}

std::string in_words(const RowOrder& order) {
  if (!order.unread.empty()) return "rows in an order that is not known: " + order.unread;
  if (order.turns <= 0) return "all rows of the gate before those of the up projection";
  return "rows that take turns every " + std::to_string(order.turns);
}

/// Throws if sources of a combination, which have the same names, have rows in different orders.
/// Sources without arguments, such as an adapter, follow the first.
void require_equal_orders(const CheckpointReader& reader,
                          const std::vector<MegatronArguments>& of_sources) {
  for (std::size_t s = 1; s < of_sources.size(); ++s) {
    if (of_sources[s].numbers.empty() && of_sources[s].unread.empty()) continue;
    const RowOrders first = row_orders_in(of_sources.front());
    const RowOrders other = row_orders_in(of_sources[s]);
    const bool is_of_experts = first.experts != other.experts;
    if (!is_of_experts && first.shared_experts == other.shared_experts) continue;
    throw Error::expected(
        ErrorKind::unsupported, {.path = reader.path()}, "order of rows",
        in_words(is_of_experts ? first.experts : first.shared_experts) + ", as in the first source",
        in_words(is_of_experts ? other.experts : other.shared_experts) + " in source " +
            std::to_string(s + 1),
        "apply the recipe to each source by itself, then combine the results");
  }
}

/// Adds rules that drop the values that say that rows of `tensors` take turns, also the whole
/// object that replaces `common.pt`.
void drop_sizes_of_turns(const CheckpointContents& contents,
                         const std::vector<std::string>& tensors, Rules& rules) {
  for (const ValueEntry& value : contents.values) {
    const bool is_size = std::ranges::any_of(kTurns, [&](std::string_view name) {
      return text_before(value.name, std::string(kArgs) + std::string(name)).has_value();
    });
    const auto before_object = formats::megatron::before_common_object(value.name);
    const bool is_object =
        before_object && std::ranges::any_of(tensors, [&](const std::string& tensor) {
          return tensor.starts_with(*before_object);
        });
    if (!is_size && !is_object) continue;
    auto name = NameTemplate::parse(value.name);
    if (auto* const parsed = std::get_if<NameTemplate>(&name)) {
      rules.rules.push_back({.number = kMegatronRule, .from = {std::move(*parsed)}});
    }
  }
}

std::string counted_tensors(const std::vector<std::string>& names) {
  return std::to_string(names.size()) + (names.size() == 1 ? " tensor" : " tensors");
}

Finding note_of(const std::string& path, std::string expected, std::string found) {
  return {.severity = Finding::Severity::note,
          .rule = formats::megatron::kRowsRule,
          .where = {.path = path},
          .expected = std::move(expected),
          .found = std::move(found)};
}

/// Returns the stated versions, by the text before `checkpoint_version`.
std::map<std::string, double> versions_in_values(const CheckpointReader& reader) {
  std::map<std::string, double> versions;
  const auto& values = reader.contents().values;
  for (std::size_t v = 0; v < values.size(); ++v) {
    const auto before = text_before(values[v].name, "checkpoint_version");
    if (!before) continue;
    const Value value = reader.read_value(v);
    double& version = versions[*before];
    if (const auto number = number_in(value)) version = static_cast<double>(*number);
    if (const auto* const number = value.get_if<double>()) version = *number;
  }
  return versions;
}

/// Reads the arguments from the object that replaces `common.pt` in newer versions; nothing if the
/// checkpoint has none.
std::optional<MegatronArguments> arguments_in_common_object(const FileSystem& fs,
                                                            const std::string& path) {
  const auto reader = formats::megatron::open_common_object(fs, path);
  if (!reader) return std::nullopt;
  MegatronArguments arguments;
  const auto& values = reader->contents().values;
  try {
    for (std::size_t v = 0; v < values.size(); ++v) {
      const std::string& name = values[v].name;
      if (!formats::megatron::before_common_object(name)) continue;
      // An object that is read item by item holds more than values. Only its arguments matter.
      const bool is_item = name.find('.') != std::string::npos;
      if (!is_item || name.ends_with(".args")) reader->read_value(v);
    }
    arguments.numbers = std::move(arguments_in_values(*reader, kTurnsAndRanks)[""]);
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    arguments.unread = "an object that cannot be read: " + std::string(error.what());
  }
  return arguments;
}

void require_new_order_in(const CheckpointReader& reader) {
  std::optional<std::map<std::string, double>> read;
  for (const formats::TensorEntry& tensor : reader.contents().tensors) {
    const std::string& fqn = tensor.meta.fqn;
    if (!formats::megatron::is_of_module(fqn, "query_key_value") &&
        !formats::megatron::is_of_module(fqn, "key_value")) {
      continue;
    }
    if (!read) read = versions_in_values(reader);
    const auto& versions = *read;
    const auto stated = nearest(versions, fqn);
    if (stated == versions.end() && reader.format() != formats::Format("megatron")) {
      continue;  // not a file of Megatron: nothing says which order it is
    }
    // Without the value, Megatron reads its files as version 0.
    const double version = stated == versions.end() ? 0 : stated->second;
    if (version >= 2) continue;
    throw Error::expected(ErrorKind::unsupported, {.path = reader.path(), .fqn = fqn},
                          "order of rows", "checkpoint_version 2 or later",
                          "version " + std::string(version < 1 ? "0" : "1") +
                              ", which has the rows of Q, K and V in another order (if the rules "
                              "of the recipe expect it, remove \"megatron\" from the recipe)");
  }
}

}  // namespace

bool may_take_turns(std::string_view name) {
  return formats::megatron::second_of_perceptron(name) &&
         (formats::megatron::is_of_expert(name) || formats::megatron::is_of_shared_expert(name));
}

std::optional<MegatronArguments> arguments_in_common_file(const FileSystem& fs,
                                                          const std::string& folder) {
  const std::string path = join_path(folder, formats::megatron::kCommonFile);
  if (fs.kind_of(path) != FileKind::regular) return std::nullopt;
  MegatronArguments arguments;
  try {
    const auto file = formats::open_torch_zip_with_classes(fs, path, {"argparse.Namespace"});
    const auto& values = file->contents().values;
    const auto whole = std::ranges::find(values, "args", &ValueEntry::name);
    if (whole != values.end()) {
      // Objects of other classes cannot be read: this throws.
      file->read_value(static_cast<std::size_t>(whole - values.begin()));
    }
    auto found = arguments_in_values(*file, kTurnsAndRanks);
    arguments.numbers = std::move(found[""]);
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    // Another program's file says nothing about Megatron's tensors.
    if (formats::megatron::is_torch_dist(fs, folder)) {
      arguments.unread = "a file that cannot be read: " + std::string(error.what());
    }
  }
  return arguments;
}

MegatronArguments arguments_of_checkpoint(const FileSystem& fs, const std::string& path) {
  auto in_file = arguments_in_common_file(fs, path);
  auto in_object = arguments_in_common_object(fs, path);
  if (!in_file || !in_object) return in_file ? *in_file : in_object.value_or(MegatronArguments());
  if (!in_file->unread.empty()) return *in_file;
  if (!in_object->unread.empty()) return *in_object;
  for (const std::string_view name : kTurnsAndRanks) {
    const std::int64_t of_file = argument(in_file->numbers, name);
    const std::int64_t of_object = argument(in_object->numbers, name);
    if (of_file == of_object) continue;
    in_file->unread = std::string(name) + " " + std::to_string(of_file) + " in common.pt and " +
                      std::to_string(of_object) + " in the object";
    break;
  }
  return *in_file;
}

RowOrders row_orders_in(const MegatronArguments& arguments) {
  RowOrders orders;
  const std::int64_t num_ranks = argument(arguments.numbers, kTensorRanks);
  const std::int64_t num_ranks_of_experts = argument(arguments.numbers, kTensorRanksOfExperts);
  orders.experts = {.turns = argument(arguments.numbers, kTurnsOfExperts),
                    .num_ranks = num_ranks_of_experts == 0 ? num_ranks : num_ranks_of_experts};
  orders.shared_experts = {.turns = argument(arguments.numbers, kTurnsOfSharedExperts),
                           .num_ranks = num_ranks};
  for (RowOrder* const order : {&orders.experts, &orders.shared_experts}) {
    if (order->turns <= 0) *order = {};  // the number of ranks does not matter
    order->unread = arguments.unread;
  }
  return orders;
}

RowOrders row_orders_of(const CheckpointReader& reader, const RecipeOptions& options) {
  struct Stated {
    RowOrder order;
    std::string path;
    std::string fqn;
  };
  std::map<bool, Stated> stated;  // by whether they are of experts or of shared ones
  const auto add_source = [&](const CheckpointReader& source, std::size_t number, bool are_states) {
    // In values, tensors are whole: the number of ranks does not matter.
    const auto in_values = arguments_in_values(source, kTurns);
    const auto& files = options.megatron_arguments;
    for (const formats::TensorEntry& tensor : source.contents().tensors) {
      const std::string& fqn = tensor.meta.fqn;
      if (!may_take_turns(fqn)) continue;
      if (reshard::behind_state(fqn).has_value() != are_states) continue;
      MegatronArguments arguments = number < files.size() ? files[number] : MegatronArguments();
      if (const auto found = nearest(in_values, fqn); found != in_values.end()) {
        arguments.numbers.insert(found->second.begin(), found->second.end());
      }
      const RowOrder order = order_of(fqn, row_orders_in(arguments));
      const auto [known, is_new] = stated.try_emplace(formats::megatron::is_of_expert(fqn),
                                                      Stated{order, source.path(), fqn});
      if (is_new || known->second.order == order) continue;
      const Stated& other = known->second;
      throw Error::expected(
          ErrorKind::unsupported, {.path = source.path(), .fqn = fqn}, "order of rows",
          in_words(other.order) + ", as '" + printable(other.fqn) + "' in " + printable(other.path),
          in_words(order), "apply the recipe to each source by itself, then merge the results");
    }
  };
  const auto merged = formats::sources_of_merge(reader);
  for (const bool are_states : {false, true}) {
    // State follows its parameter, which may be in another source than the state.
    if (!stated.empty()) break;
    if (merged.empty()) {
      add_source(reader, 0, are_states);
      require_equal_orders(reader, options.megatron_arguments);
    }
    for (std::size_t s = 0; s < merged.size(); ++s) add_source(*merged[s].reader, s, are_states);
  }
  RowOrders orders;
  if (const auto found = stated.find(true); found != stated.end()) {
    orders.experts = found->second.order;
  }
  if (const auto found = stated.find(false); found != stated.end()) {
    orders.shared_experts = found->second.order;
  }
  return orders;
}

bool use_rows(const Rules& rules, const std::string& prefix, const CheckpointContents& contents) {
  const std::vector<Input> inputs;
  const RuleMatcher matcher(rules, prefix, inputs, [](auto&&...) {});
  return std::ranges::any_of(names_with_rows(contents), [&](const std::string& name) {
    const auto match = matcher.match(name);
    return match && !rules.rules[match->rule].drops();
  });
}

std::set<std::string> names_with_rows(const CheckpointContents& contents) {
  std::set<std::string> names;
  for (const formats::TensorEntry& tensor : contents.tensors) {
    if (may_take_turns(tensor.meta.fqn)) names.insert(tensor.meta.fqn);
  }
  for (const formats::Alias& alias : contents.aliases) {
    if (may_take_turns(alias.fqn)) names.insert(alias.fqn);
  }
  return names;
}

std::optional<RulesWithNote> rules_for_rows(const std::string& recipe_path,
                                            const CheckpointContents& contents,
                                            const RowOrders& orders, const std::string& path) {
  Rules rules{.path = recipe_path, .rest = Rest::keep};
  std::set<std::string> patterns;
  std::vector<std::string> names;
  std::int64_t turns = 0;
  const Inputs inputs(contents);  // without state, which follows its parameter
  for (const Input& input : inputs.all()) {
    const std::string& name = *input.name;
    if (!may_take_turns(name) || name.find_first_of("{}") != std::string::npos) continue;
    const RowOrder& order = order_of(name, orders);
    auto operations = operations_for_rows(name, order, path);
    if (operations.empty()) continue;
    turns = order.turns;
    names.push_back(name);
    const std::string pattern = with_captures(name);
    if (!patterns.insert(pattern).second) continue;
    auto parsed = NameTemplate::parse(pattern);
    if (const auto* const problem = std::get_if<NameTemplate::Problem>(&parsed)) {
      throw Error::expected(ErrorKind::unsupported, {.path = path, .fqn = name},
                            rule_name(kMegatronRule), problem->expected, problem->found);
    }
    const auto& both = std::get<NameTemplate>(parsed);
    rules.rules.push_back({kMegatronRule, {both}, {both}, std::move(operations)});
  }
  if (names.empty()) return std::nullopt;
  drop_sizes_of_turns(contents, names, rules);
  return RulesWithNote{
      std::move(rules),
      note_of(path, "rows in the order of the source",
              counted_tensors(names) + " in which rows of gate and up took turns every " +
                  std::to_string(turns) + ", such as '" + printable(names.front()) +
                  "' (the gate comes first now)")};
}

std::optional<RulesWithNote> rules_for_made_rows(const std::string& recipe_path,
                                                 const CheckpointReader& made,
                                                 const RecipeOptions& options,
                                                 const std::set<std::string>& before) {
  std::vector<MegatronArguments> stated = options.megatron_arguments;
  for (auto& [beginning, numbers] : arguments_in_values(made, kTurns)) {
    stated.push_back({.numbers = std::move(numbers)});
  }
  std::vector<std::string> names;
  std::int64_t turns = 0;
  for (const std::string& name : names_with_rows(made.contents())) {
    if (before.contains(name)) continue;  // not made by the recipe
    for (const MegatronArguments& arguments : stated) {
      const std::int64_t stated_turns = order_of(name, row_orders_in(arguments)).turns;
      if (stated_turns <= 0) continue;
      turns = stated_turns;
      names.push_back(name);
      break;
    }
  }
  if (names.empty()) return std::nullopt;
  Rules rules{.path = recipe_path, .rest = Rest::keep};
  drop_sizes_of_turns(made.contents(), names, rules);
  return RulesWithNote{
      std::move(rules),
      note_of(made.path(),
              "rows of gate and up that take turns every " + std::to_string(turns) +
                  ", as Megatron's arguments say",
              counted_tensors(names) + " in which the gate comes first, such as '" +
                  printable(names.front()) + "' (without these arguments, Megatron reads it so)")};
}

void require_new_order_of_rows(const CheckpointReader& reader) {
  const auto merged = formats::sources_of_merge(reader);
  if (merged.empty()) require_new_order_in(reader);
  for (const formats::MergeSource& source : merged) require_new_order_in(*source.reader);
}

}  // namespace tessera::recipe
