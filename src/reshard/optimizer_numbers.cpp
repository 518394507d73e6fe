#include "reshard/optimizer_numbers.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text_parts.h"
#include "reshard/numbered_optimizer.h"
#include "reshard/optimizer_rules.h"
#include "reshard/renamed_entries.h"
#include "tessera/base/error.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointReader;
using formats::Key;
using formats::KeyPath;
using formats::NonStringKey;

constexpr std::string_view kNumbersRule = "numbers for parameters";

/// Numbers by name.
using Numbers = std::map<std::string, std::int64_t, std::less<>>;

Numbers numbers_of(const CheckpointReader& reader, const NamedOptimizer& optimizer) {
  Numbers numbers;
  for (const std::string& name : optimizer.names) {
    if (numbers.emplace(name, static_cast<std::int64_t>(numbers.size())).second) continue;
    throw Error::expected(
        ErrorKind::mismatch, {.path = reader.path(), .fqn = optimizer.root + "param_groups"},
        kNumbersRule, "each name in one list of params", "'" + printable(name) + "' twice");
  }
  return numbers;
}

/// Returns `value`, which is `param_groups` or `params` of one group, with numbers instead of
/// names.
Value params_with_numbers(Value value, const Numbers& numbers) {
  auto* const list = value.get_if<Value::List>();
  TESSERA_CHECK(list != nullptr);  // find_named_optimizer has checked it
  for (Value& item : *list) {
    if (const auto* const name = item.get_if<std::string>()) {
      item = numbers.at(*name);
    } else if (auto* const group = item.get_if<Value::Dict>()) {
      for (auto& [key, member] : *group) {
        if (key == Value("params")) member = params_with_numbers(std::move(member), numbers);
      }
    }
  }
  return value;
}

/// Reads a checkpoint in which an optimizer names its parameters, and shows numbers in their place.
class NumberedParamsReader final : public RenamedEntries {
 public:
  NumberedParamsReader(std::unique_ptr<CheckpointReader> source, const NamedOptimizer& optimizer,
                       Numbers numbers)
      : RenamedEntries(std::move(source)),
        front_(optimizer.root + "state."),
        numbers_(std::move(numbers)),
        params_values_(optimizer.values.begin(), optimizer.values.end()),
        roles_(classify_state(base().contents())) {
    rename_entries("state only under a name", "also state under this number");
  }

 private:
  /// Returns the longest parameter name with which `rest`, the text after `state.`, begins.
  std::optional<std::string_view> parameter_in(std::string_view rest) const {
    for (std::size_t end = rest.size(); end != std::string_view::npos;
         end = end == 0 ? std::string_view::npos : rest.rfind('.', end - 1)) {
      if (numbers_.contains(rest.substr(0, end))) return rest.substr(0, end);
    }
    return std::nullopt;
  }

  bool rename(std::string& name, formats::SharedKeyPath& path) const override {
    const std::size_t begin = place_behind(name, front_);
    if (begin == std::string::npos) return false;
    const auto parameter = parameter_in(std::string_view(name).substr(begin));
    if (!parameter) {
      throw Error::expected(ErrorKind::mismatch, {.path = this->path(), .fqn = name}, kNumbersRule,
                            "state of a parameter that a list params of param_groups names (" +
                                std::to_string(numbers_.size()) + " names in all)",
                            "state of a parameter in none of these lists");
    }
    const std::int64_t number = numbers_.find(*parameter)->second;
    const KeyPath whole = path.empty() ? KeyPath{name} : KeyPath(path);
    path = with_number(whole, name.substr(0, begin - 1), name.substr(0, begin + parameter->size()),
                       number);
    name.replace(begin, parameter->size(), std::to_string(number));
    return true;
  }

  /// Replaces the keys that spell the parameter by one key, a number. `state`: the name up to
  /// `state`. `spelled`: the name up to the parameter's end.
  static KeyPath with_number(const KeyPath& path, const std::string& state,
                             const std::string& spelled, std::int64_t number) {
    const KeyPath front = split(path, state);
    const KeyPath whole = split(path, spelled);
    KeyPath result = front;
    result.push_back(*formats::dict_key(Value(number)));
    const std::size_t used = formats::spell(whole).size();
    const std::string all = formats::spell(path);
    if (used == all.size()) return result;
    // The keys behind the parameter: those of the path, or the rest of the name as one key.
    KeyPath behind;
    std::size_t end = all.size();
    for (auto key = path.rbegin(); key != path.rend() && end > used; ++key) {
      const std::size_t nbytes = formats::spell({*key}).size();
      if (end < used + 1 + nbytes) break;
      behind.insert(behind.begin(), *key);
      end -= nbytes + 1;
    }
    if (end != used) behind = {all.substr(used + 1)};
    result.insert(result.end(), behind.begin(), behind.end());
    return result;
  }

  /// Returns the keys at the front of `path` that spell `text`. If no keys end exactly there,
  /// splits `text` at its dots.
  static KeyPath split(const KeyPath& path, const std::string& text) {
    for (std::size_t n = 1; n <= path.size(); ++n) {
      const KeyPath keys(path.begin(), path.begin() + static_cast<std::ptrdiff_t>(n));
      if (formats::spell(keys) == text) return keys;
    }
    KeyPath keys;
    for (const std::string_view part : tessera::detail::split(text, '.')) {
      keys.emplace_back(std::string(part));
    }
    return keys;
  }

  /// Keeps what the name says and the number does not: which parameter the state belongs to.
  void set_role(std::size_t tensor_in_source, formats::TensorEntry& tensor) const override {
    const StateRole& role = roles_[tensor_in_source];
    if (!role.parameter_index) return;
    tensor.kind = role.kind;
    tensor.parameter = base().contents().tensors[*role.parameter_index].meta.fqn;
  }

  std::string renamed_text(const std::string& name) const override {
    const std::size_t begin = place_behind(name, front_);
    if (begin == std::string::npos) return name;
    const auto parameter = parameter_in(std::string_view(name).substr(begin));
    if (!parameter) return name;
    return name.substr(0, begin) + std::to_string(numbers_.find(*parameter)->second) +
           name.substr(begin + parameter->size());
  }

  Value changed(std::size_t value_in_source, Value value) const override {
    return params_values_.contains(value_in_source)
               ? params_with_numbers(std::move(value), numbers_)
               : value;
  }

  const std::string front_;  // `optim.state.`
  const Numbers numbers_;
  const std::set<std::size_t> params_values_;  // indices of the source's values that list names
  const std::vector<StateRole> roles_;         // one per tensor of the source
};

}  // namespace

std::unique_ptr<CheckpointReader> number_optimizer_params(std::unique_ptr<CheckpointReader> source,
                                                          const NameSelection& only) {
  const NamedOptimizer optimizer = find_named_optimizer(*source, only);
  Numbers numbers = numbers_of(*source, optimizer);
  return std::make_unique<NumberedParamsReader>(std::move(source), optimizer, std::move(numbers));
}

}  // namespace tessera::reshard
