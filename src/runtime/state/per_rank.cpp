#include "runtime/state/per_rank.h"

#include <algorithm>

#include "tessera/base/error.h"

namespace tessera::state {

std::string policy_name(PerRank policy) {
  switch (policy) {
    case PerRank::refuse:
      return "refuse";
    case PerRank::replicate:
      return "replicate";
    case PerRank::merge:
      return "merge";
    case PerRank::split:
      return "split";
    case PerRank::drop:
      return "drop";
  }
  return "";
}

namespace {

/// Joins the lists of all saved ranks, cuts the result into `world_size` parts of about equal
/// length, and returns the part of `rank`.
Value part_of(const std::vector<Value>& lists, int rank, int world_size) {
  Value::List all;
  for (const Value& list : lists) {
    const auto& items = *list.get_if<Value::List>();
    all.insert(all.end(), items.begin(), items.end());
  }
  const auto num_ranks = static_cast<std::size_t>(world_size);
  const auto number = static_cast<std::size_t>(rank);
  const std::size_t begin = all.size() * number / num_ranks;
  const std::size_t end = all.size() * (number + 1) / num_ranks;
  return Value::List(all.begin() + static_cast<std::ptrdiff_t>(begin),
                     all.begin() + static_cast<std::ptrdiff_t>(end));
}

}  // namespace

Value value_for(const std::string& name, const Stateful& object, PerRank policy,
                const std::vector<Value>& saved, int rank, int world_size) {
  const auto number = static_cast<std::size_t>(rank);
  switch (policy) {
    case PerRank::replicate:
      return saved[number % saved.size()];
    case PerRank::merge:
      return Value::List(saved.begin(), saved.end());
    case PerRank::split:
      if (std::ranges::all_of(saved, [](const Value& v) { return v.is<Value::List>(); })) {
        return part_of(saved, rank, world_size);
      }
      if (!object.branch) break;
      if (number < saved.size()) return saved[number];
      return object.branch(saved[number % saved.size()], rank);
    default:
      break;
  }
  throw Error::expected(ErrorKind::mismatch, {.fqn = name}, "per-rank value with the policy split",
                        "a list, or an object with Stateful::branch",
                        std::string(type_name(saved.front())));
}

}  // namespace tessera::state
