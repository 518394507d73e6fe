#include "reshard/destination_names.h"

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/key_paths.h"
#include "tessera/base/error.h"

namespace tessera::reshard {
namespace {

using formats::Alias;
using formats::CheckpointContents;
using formats::TensorEntry;
using formats::ValueEntry;

/// Sorts `entries` by name, and puts `others`, which belong to them by index, into the same order.
template <class Entry, class Other, class NameOf>
void sort_both(std::vector<Entry>& entries, std::vector<Other>& others, NameOf name_of) {
  const auto is_before = [&](const Entry& a, const Entry& b) { return name_of(a) < name_of(b); };
  if (std::is_sorted(entries.begin(), entries.end(), is_before)) return;
  std::vector<std::size_t> order(entries.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return is_before(entries[a], entries[b]); });
  std::vector<Entry> sorted_entries;
  std::vector<Other> sorted_others;
  sorted_entries.reserve(order.size());
  sorted_others.reserve(order.size());
  for (const std::size_t i : order) {
    sorted_entries.push_back(std::move(entries[i]));
    sorted_others.push_back(std::move(others[i]));
  }
  entries = std::move(sorted_entries);
  others = std::move(sorted_others);
}

/// Returns what keeps names from being in one nested dict; nothing if they can be.
std::optional<Error> misfit_in(const CheckpointContents& contents) {
  try {
    formats::check_key_paths(contents, "");
  } catch (const Error& error) {
    return error;
  }
  return std::nullopt;
}

}  // namespace

void sort_by_name(Plan& plan) {
  CheckpointContents& destination = plan.destination;
  sort_both(destination.tensors, plan.copies,
            [](const TensorEntry& t) -> const std::string& { return t.meta.fqn; });
  sort_both(destination.values, plan.value_sources,
            [](const ValueEntry& v) -> const std::string& { return v.name; });
  std::sort(destination.aliases.begin(), destination.aliases.end(),
            [](const Alias& a, const Alias& b) { return a.fqn < b.fqn; });
}

void check_names_are_unique(const CheckpointContents& destination, const PlanOptions& options,
                            PlanReport& report) {
  std::vector<std::string_view> names;
  names.reserve(destination.tensors.size() + destination.values.size() +
                destination.aliases.size());
  for (const TensorEntry& tensor : destination.tensors) names.push_back(tensor.meta.fqn);
  for (const ValueEntry& value : destination.values) names.push_back(value.name);
  for (const Alias& alias : destination.aliases) names.push_back(alias.fqn);
  std::ranges::sort(names);
  for (auto at = names.begin(); at != names.end();) {
    const std::string_view name = *at;
    const auto next = std::find_if(at, names.end(), [&](auto other) { return other != name; });
    const auto count = next - at;
    at = next;
    if (name.empty() && !options.renames.empty()) {
      report.problem("rename", "", "rules that leave a part of each name", "an empty new name");
    }
    if (count == 1) continue;
    report.problem("rename", std::string(name), "one entry of that name",
                   std::to_string(count) + " (do rules give several entries one name?)");
  }
}

void check_names_form_a_tree(const CheckpointContents& source,
                             const CheckpointContents& destination, PlanReport& report) {
  const auto wrong = misfit_in(destination);
  if (!wrong || misfit_in(source)) return;
  report.problem("rename", wrong->where().fqn, "names that fit into one nested dict",
                 std::string(wrong->reason()));
}

void remove_aliases_of_nothing(CheckpointContents& destination) {
  std::erase_if(destination.aliases, [&](const Alias& alias) {
    return destination.find_tensor(alias.target) == nullptr;
  });
}

}  // namespace tessera::reshard
