#include "formats/deepspeed/universal_notes.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <utility>

#include "base/cast.h"
#include "base/size_text.h"

namespace tessera::formats::deepspeed {
namespace {

Finding note(std::string rule, ErrorWhere where, std::string expected, std::string found) {
  return {.severity = Finding::Severity::note,
          .rule = std::move(rule),
          .where = std::move(where),
          .expected = std::move(expected),
          .found = std::move(found)};
}

/// Returns the number in a step; nothing if the step is anything else.
std::optional<double> number_in(const Leaf& step, const CheckpointContents& contents,
                                const FormatWriter::ReadElement& read) {
  if (const auto* const value = step.value()) {
    const auto* const integer = value->get_if<std::int64_t>();
    if (integer != nullptr) return static_cast<double>(*integer);
    const auto* const real = value->get_if<double>();
    return real == nullptr ? std::nullopt : std::optional(*real);
  }
  if (contents.tensors[*step.tensor()].meta.numel() != 1) return std::nullopt;
  const auto [dtype, bytes] = read(*step.tensor());
  if (!can_cast(dtype, DType::float64)) return std::nullopt;
  double number = 0;
  cast_elements(dtype, std::as_bytes(std::span(bytes)), DType::float64,
                std::as_writable_bytes(std::span(&number, 1)));
  return number;
}

}  // namespace

std::optional<Finding> note_of_params_without_state(const UniversalEntries& entries,
                                                    const std::string& destination) {
  if (entries.state.empty()) return std::nullopt;
  std::set<std::string> names;
  for (const ParamGroup& group : entries.groups) {
    for (const std::string& name : group.params) {
      if (entries.weights.contains(name) && !entries.state.contains(name)) names.insert(name);
    }
  }
  if (names.empty()) return std::nullopt;
  const std::string& first = *names.begin();
  return note("state", {.path = destination}, "state of each parameter in a group",
              counted(names.size(), "parameter") + " without state, such as '" + printable(first) +
                  "' (in the module only, as frozen parameters are)");
}

std::optional<Finding> note_of_steps(const UniversalEntries& entries,
                                     const CheckpointContents& contents,
                                     const std::string& destination,
                                     const FormatWriter::ReadElement& read) {
  const Leaf* first = nullptr;
  std::optional<double> first_number;
  for (const auto& [name, state] : entries.state) {
    const Leaf* const step = step_in(state);
    if (step == nullptr) continue;
    const std::optional<double> number = number_in(*step, contents, read);
    if (first == nullptr) {
      first = step;
      first_number = number;
    } else if (number && first_number && *number != *first_number) {
      return note(
          "step", {.path = destination, .fqn = step->name},
          value_to_string(Value(*first_number)) + ", as " + printable(first->name) + " has",
          value_to_string(Value(*number)) +
              " (ZeRO stage 3 takes the first step for all parameters; stages 1 and 2 stop if "
              "steps differ within a group)");
    }
  }
  return std::nullopt;
}

}  // namespace tessera::formats::deepspeed
