#include "reshard/value_changes.h"

#include <algorithm>
#include <string>

#include "formats/simplified_values.h"
#include "reshard/format_changes.h"

namespace tessera::reshard {

void add_changes_of_values(Plan& plan, const formats::CheckpointReader& reader) {
  if (!plan.problems.empty()) return;
  for (const std::size_t value : plan.value_sources) {
    for (const auto& [kind, name, what] : formats::simplifications_of_value(reader, value)) {
      const FormatChange change = change_of(kind);
      auto counted = std::ranges::lower_bound(plan.changes, change, {}, &FormatChangeCount::change);
      if (counted == plan.changes.end() || counted->change != change) {
        counted = plan.changes.insert(counted, {.change = change, .count = 0});
      }
      ++counted->count;
      counted->names.insert(counted->names.end(), what.begin(), what.end());
    }
  }
  for (FormatChangeCount& counted : plan.changes) {
    std::ranges::sort(counted.names);
    const auto repeated = std::ranges::unique(counted.names);
    counted.names.erase(repeated.begin(), repeated.end());
  }
}

}  // namespace tessera::reshard
