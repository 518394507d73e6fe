#include "runtime/embedding/table_state.h"

#include <torch/types.h>

#include "runtime/registry/own_state_dict_hooks.h"
#include "runtime/registry/state_tensor_conversion.h"
#include "tessera/runtime/registry/fused_updates.h"

namespace tessera::embedding {
namespace {

using registry::FusedParameter;
using torch::nn::Module;

std::string weight_name(const LocalTable& table) {
  return "embedding_bags." + table.name + ".weight";
}

/// Adds hooks to the module that has the weight of table number `index`.
void attach_to_table(Module& owner, const std::shared_ptr<ShardedTables>& tables,
                     std::size_t index) {
  // Weak, because the registry may keep hooks for some time after the collection is destroyed. The
  // collection owns the tables.
  const std::weak_ptr<ShardedTables> weak = tables;
  registry::add_first_state_dict_post_hook(
      owner, [weak, index](Module& /*owner*/, StateDict& state_dict, const std::string& prefix,
                           const StateDictOptions& options) {
        const auto its = weak.lock();
        if (!its) return;  // a part that outlives its collection
        const LocalTable& table = its->local()[index];
        if (table.cache) table.cache->write_back();
        state::show_whole(state_dict, prefix + "weight", its->weight_entry(table),
                          *its->mesh().world(), options);
      });
  registry::add_last_load_state_dict_pre_hook(
      owner, [weak, index](Module& /*owner*/, StateDict& state_dict, const std::string& prefix,
                           LoadReport& report) {
        const auto its = weak.lock();
        if (!its) return;
        const LocalTable& table = its->local()[index];
        if (table.cache) table.cache->write_back();  // empties it, because its rows will change
        state::show_local_shard(state_dict, prefix + "weight", its->weight_entry(table),
                                table.weight, report);
      });
}

/// The optimizer state of the fused tables, for saving and loading.
class TableUpdates final : public registry::FusedUpdates {
 public:
  explicit TableUpdates(std::shared_ptr<ShardedTables> tables) : tables_(std::move(tables)) {}

  std::vector<FusedParameter> parameters() override {
    tables_->write_back_cached_rows();
    std::vector<FusedParameter> parameters;
    for (LocalTable& table : tables_->local()) {
      if (table.kernel != Kernel::fused) continue;
      FusedParameter& parameter = parameters.emplace_back();
      parameter.name = weight_name(table);
      parameter.tensor = table.weight;
      for (const FusedState::Slot& slot : table.state.slots) {
        parameter.slots.push_back({slot.name, tables_->state_entry(table, slot)});
      }
      if (counts_steps(*tables_->optimizer())) parameter.step = &table.state.step;
    }
    return parameters;
  }
  Value::Dict fields() const override { return fields_of(*tables_->optimizer()); }
  void check_fields(const Value::Dict& fields) const override {
    with_fields(*tables_->optimizer(), fields);
  }
  void set_fields(const Value::Dict& fields) override {
    tables_->set_optimizer(with_fields(*tables_->optimizer(), fields));
  }

 private:
  std::shared_ptr<ShardedTables> tables_;
};

}  // namespace

std::shared_ptr<registry::FusedUpdates> fused_updates(
    const std::shared_ptr<ShardedTables>& tables) {
  if (!tables->optimizer()) return nullptr;
  return std::make_shared<TableUpdates>(tables);
}

void attach_state_dict_hooks(const Module& collection,
                             const std::shared_ptr<ShardedTables>& tables) {
  const auto modules = collection.named_modules();
  for (const LocalTable& table : tables->local()) {
    attach_to_table(*modules["embedding_bags." + table.name], tables, table.table);
  }
}

}  // namespace tessera::embedding
