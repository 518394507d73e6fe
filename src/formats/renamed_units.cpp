#include "formats/renamed_units.h"

#include <algorithm>
#include <set>
#include <utility>
#include <vector>

#include "base/size_text.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

/// Returns whether there is a tensor, or an alias of one, with this name and shape.
bool has_tensor(const CheckpointContents& contents, const std::string& name, const Shape& shape) {
  const TensorEntry* tensor = contents.find_tensor(name);
  const auto alias = std::ranges::lower_bound(contents.aliases, name, {}, &Alias::fqn);
  if (tensor == nullptr && alias != contents.aliases.end() && alias->fqn == name) {
    tensor = contents.find_tensor(alias->target);
  }
  return tensor != nullptr && tensor->meta.shape == shape;
}

}  // namespace

void take_units(
    const CheckpointReader& source,
    const std::function<std::optional<std::string>(const std::string& parameter)>& new_name,
    CheckpointContents& contents) {
  contents.units.clear();
  std::set<std::string> taken;
  std::vector<std::string> lost;
  for (FlatUnit unit : source.contents().units) {
    const bool is_kept = std::ranges::all_of(unit.parameters, [&](FlatUnitParameter& parameter) {
      auto name = new_name(parameter.fqn);
      if (!name || !has_tensor(contents, *name, parameter.shape)) return false;
      parameter.fqn = *std::move(name);
      return taken.insert(parameter.fqn).second;
    });
    if (is_kept) {
      contents.units.push_back(std::move(unit));
    } else {
      lost.push_back(unit.name);
    }
  }
  if (lost.empty()) return;
  contents.opening_findings.push_back(
      {.severity = Finding::Severity::note,
       .rule = "units",
       .where = {.path = source.path()},
       .expected = "flat units whose parameters change only their names",
       .found = counted(lost.size(), "flat unit") + " ('" + printable(lost.front()) +
                (lost.size() == 1 ? "')" : "', …)") + " left out"});
}

}  // namespace tessera::formats
