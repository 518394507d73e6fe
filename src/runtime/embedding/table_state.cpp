#include "runtime/embedding/table_state.h"

#include <torch/types.h>

#include "runtime/registry/state_parts.h"
#include "tessera/runtime/registry/fused_updates.h"
#include "tessera/runtime/registry/state_dict_hooks.h"

namespace tessera::embedding {
namespace {

using registry::FusedParameter;
using torch::nn::Module;

std::string weight_name(const LocalTable& table) {
  return "embedding_bags." + table.name + ".weight";
}

/// Puts what the state dict is to hold of a table in the place of this rank's shard.
void take(const ShardedTables& tables, const LocalTable& table, StateDict& state_dict,
          const std::string& fqn, const StateDictOptions& options) {
  StateEntry* const entry = state_dict.find(fqn);
  if (entry == nullptr || std::holds_alternative<StateAlias>(*entry)) return;
  std::get<StateTensor>(*entry).parts.clear();  // no copy of the shard meanwhile
  *entry = state::as_asked(tables.weight_entry(table), *tables.mesh().world(), options, fqn);
}

/// Puts this rank's shard in the place of a table, for the walk to load.
void cut_out(const ShardedTables& tables, const LocalTable& table, StateDict& state_dict,
             const std::string& fqn, LoadReport& report) {
  StateEntry* const entry = state_dict.find(fqn);
  // What is not there is told by the walk; an alias is dealt with under its target's name.
  if (entry == nullptr || std::holds_alternative<StateAlias>(*entry)) return;
  const StateTensor wanted = tables.weight_entry(table);
  const StateTensor* found = find_fitting(state_dict, fqn, wanted.dtype, wanted.shape, report);
  at::Tensor part = torch::empty(table.weight.sizes(), table.weight.options().requires_grad(false));
  if (found != nullptr && part.numel() > 0) {
    if (const auto own = state::cut(*found, table.region)) {
      part = own->view(part.sizes()).to(part.scalar_type());
    } else {
      report.add("hole", fqn, region_to_string(table.region), "parts that do not hold all of it");
    }
  }
  *entry = StateTensor::whole(part);
}

/// The optimizer state of the fused tables, for whoever saves and loads optimizer state.
class TableUpdates final : public registry::FusedUpdates {
 public:
  explicit TableUpdates(std::shared_ptr<ShardedTables> tables) : tables_(std::move(tables)) {}

  std::vector<FusedParameter> parameters() override {
    std::vector<FusedParameter> parameters;
    for (LocalTable& table : tables_->local()) {
      if (table.kernel != Kernel::fused) continue;
      FusedParameter& parameter = parameters.emplace_back();
      parameter.name = weight_name(table);
      parameter.tensor = table.weight;
      for (const FusedState::Slot& slot : table.state.slots) {
        parameter.slots.push_back({slot.name, tables_->state_entry(table, slot)});
      }
      if (counts_steps(tables_->optimizer())) parameter.step = &table.state.step;
    }
    return parameters;
  }
  Value::Dict fields() const override { return fields_of(tables_->optimizer()); }
  void check_fields(const Value::Dict& fields) const override {
    with_fields(tables_->optimizer(), fields);
  }
  void set_fields(const Value::Dict& fields) override {
    tables_->optimizer() = with_fields(tables_->optimizer(), fields);
  }

 private:
  std::shared_ptr<ShardedTables> tables_;
};

}  // namespace

std::shared_ptr<registry::FusedUpdates> fused_updates(
    const std::shared_ptr<ShardedTables>& tables) {
  if (!tables->has_optimizer()) return nullptr;
  return std::make_shared<TableUpdates>(tables);
}

void attach_state_dict_hooks(Module& collection, const std::shared_ptr<ShardedTables>& tables) {
  registry::add_state_dict_post_hook(
      collection, [tables](Module& /*owner*/, StateDict& state_dict, const std::string& prefix,
                           const StateDictOptions& options) {
        for (const LocalTable& table : tables->local()) {
          take(*tables, table, state_dict, prefix + weight_name(table), options);
        }
      });
  registry::add_load_state_dict_pre_hook(
      collection, [tables](Module& /*owner*/, StateDict& state_dict, const std::string& prefix,
                           LoadReport& report) {
        for (const LocalTable& table : tables->local()) {
          cut_out(*tables, table, state_dict, prefix + weight_name(table), report);
        }
      });
}

}  // namespace tessera::embedding
