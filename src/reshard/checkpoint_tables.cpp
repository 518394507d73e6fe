#include "reshard/checkpoint_tables.h"

#include <map>

#include "reshard/optimizer_rules.h"
#include "tessera/base/error.h"

namespace tessera::reshard {
namespace {

using formats::StateKind;

void add_state(const TensorMeta& state, StateKind kind, TableSize& table) {
  switch (kind) {
    case StateKind::pointwise:
      table.state_nbytes_per_element += itemsize(state.dtype);
      break;
    case StateKind::row_wise:
    case StateKind::row_wise_per_shard:
      table.state_nbytes_per_row += itemsize(state.dtype);
      break;
    case StateKind::plain:
    case StateKind::scalar_parameter:
    case StateKind::scalar_table:
    case StateKind::opaque:
      break;
  }
}

}  // namespace

std::vector<TableSize> checkpoint_tables(const formats::CheckpointContents& contents,
                                         std::span<const std::size_t> tensors,
                                         const std::string& path) {
  std::vector<TableSize> tables;
  std::map<std::size_t, std::size_t> table_of_tensor;
  std::map<std::string, std::string> fqn_of_table;
  for (const std::size_t t : tensors) {
    const TensorMeta& meta = contents.tensors[t].meta;
    const auto name = table_of_weight(meta.fqn);
    if (!name || meta.shape.size() != 2) continue;
    const auto [known, is_new] = fqn_of_table.emplace(*name, meta.fqn);
    if (!is_new) {
      throw Error::expected(ErrorKind::mismatch, {path, meta.fqn, {}}, "table " + *name,
                            "one tensor of that name", "also " + printable(known->second),
                            "use patterns to select the tables of one collection");
    }
    table_of_tensor[t] = tables.size();
    tables.push_back(
        {.name = *name, .rows = meta.shape[0], .columns = meta.shape[1], .dtype = meta.dtype});
  }
  const std::vector<StateRole> roles = classify_state(contents);
  for (std::size_t t = 0; t < roles.size(); ++t) {
    if (!roles[t].parameter_index) continue;
    const auto table = table_of_tensor.find(*roles[t].parameter_index);
    if (table == table_of_tensor.end()) continue;
    add_state(contents.tensors[t].meta, roles[t].kind, tables[table->second]);
  }
  return tables;
}

}  // namespace tessera::reshard
