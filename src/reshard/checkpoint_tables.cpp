#include "reshard/checkpoint_tables.h"

#include <map>

#include "formats/per_rank.h"
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
                                         std::span<const TableName> names,
                                         const std::string& path) {
  std::vector<TableSize> tables;
  std::map<std::size_t, std::size_t> table_of_tensor;
  std::map<std::string, const TableName*> known_names;
  for (const TableName& name : names) {
    const TensorMeta& meta = contents.tensors[name.tensor_index].meta;
    if (meta.shape.size() != 2 || is_copy_of_rank(contents, name.fqn)) continue;
    const TableName& known = *known_names.emplace(name.table, &name).first->second;
    if (known.tensor_index != name.tensor_index) {
      throw Error::expected(ErrorKind::mismatch, {path, name.fqn, {}}, "table " + name.table,
                            "one tensor of that name", "also " + printable(known.fqn),
                            "use patterns to select the tables of one collection");
    }
    const auto [place, is_first_name] = table_of_tensor.emplace(name.tensor_index, tables.size());
    if (!is_first_name) {
      tables[place->second].other_names.push_back(name.table);
      continue;
    }
    tables.push_back(
        {.name = name.table, .rows = meta.shape[0], .columns = meta.shape[1], .dtype = meta.dtype});
  }
  const std::vector<StateRole> roles = classify_state(contents);
  for (std::size_t t = 0; t < roles.size(); ++t) {
    if (!roles[t].parameter_index || is_copy_of_rank(contents, contents.tensors[t].meta.fqn)) {
      continue;
    }
    const auto table = table_of_tensor.find(*roles[t].parameter_index);
    if (table == table_of_tensor.end()) continue;
    add_state(contents.tensors[t].meta, roles[t].kind, tables[table->second]);
  }
  return tables;
}

bool is_copy_of_rank(const formats::CheckpointContents& contents, std::string_view fqn) {
  const auto own = formats::parse_per_rank_name(fqn);
  return own && contents.find_tensor(own->name) != nullptr;
}

}  // namespace tessera::reshard
