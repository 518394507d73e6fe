#include "tessera/runtime/embedding/shard.h"

#include <torch/types.h>

#include "runtime/embedding/sharded_tables.h"
#include "runtime/embedding/table_state.h"
#include "runtime/registry/mesh_around.h"
#include "runtime/registry/parameter_shards.h"
#include "tessera/base/error.h"
#include "tessera/runtime/registry/registry.h"

namespace tessera {
namespace {

using embedding::LocalTable;
using embedding::ShardedTables;

TablePlan plan_alone(const TableSet& tables) {
  TablePlan plan;
  for (const EmbeddingBagConfig& config : tables.configs()) {
    plan.tables[config.name] = {TableSharding::table_wise, {0}};
  }
  return plan;
}

/// Notes for each part of a collection (`embedding_bags`, or one table) that all ranks of the mesh
/// have it.
void note_mesh_around_tables(const torch::nn::Module& collection, const dist::Mesh& mesh) {
  for (const auto& part : collection.modules(/*include_self=*/false)) {
    registry::attach(*part, std::make_shared<registry::MeshAround>(mesh));
  }
}

}  // namespace

ShardedEmbeddingBagCollection::ShardedEmbeddingBagCollection(
    const EmbeddingBagCollectionBase& collection, const TablePlan& plan, const dist::Mesh& mesh,
    const ShardOptions& options)
    : EmbeddingBagCollectionBase(collection.tables()),
      sharded_(std::make_shared<ShardedTables>(collection, plan, mesh, options)) {
  for (const LocalTable& table : sharded_->local()) {
    register_weight(table.name, table.weight);
    const StateTensor whole = sharded_->weight_entry(table);
    registry::note_shard(table.weight,
                         {{"embedding_bags." + table.name + ".weight", whole.dtype, whole.shape},
                          table.is_replicated() ? nullptr : mesh.world(),
                          !table.state.slots.empty()});
  }
}
ShardedEmbeddingBagCollection::~ShardedEmbeddingBagCollection() = default;

const TablePlan& ShardedEmbeddingBagCollection::plan() const {
  return sharded_->plan();
}

std::shared_ptr<registry::FusedUpdates> ShardedEmbeddingBagCollection::fused_updates() const {
  return embedding::fused_updates(sharded_);
}

void ShardedEmbeddingBagCollection::write_back_cached_rows() {
  sharded_->write_back_cached_rows();
}

DistributedInput ShardedEmbeddingBagCollection::distribute(const KeyedJaggedTensor& batch) {
  return DistributedInput(sharded_->start(batch));
}

KeyedTensor ShardedEmbeddingBagCollection::forward(DistributedInput input) {
  return tables().named(sharded_->forward(input.inputs_));
}

KeyedTensor ShardedEmbeddingBagCollection::forward(const KeyedJaggedTensor& batch) {
  return tables().named(sharded_->forward(batch));
}

DistributedInput ShardedEmbeddingBagCollection::refuse_batch(std::exception_ptr why) {
  return DistributedInput(sharded_->refuse(std::move(why)));
}

const std::optional<embedding::FusedOptimizer>& ShardedEmbeddingBagCollection::optimizer() const {
  return sharded_->optimizer();
}

void ShardedEmbeddingBagCollection::set_optimizer(const embedding::FusedOptimizer& optimizer) {
  sharded_->set_optimizer(optimizer);
}

void DistributedInput::advance() {
  if (inputs_ == nullptr) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "input of an embedding collection",
                          "an input that `distribute` returned", "an input that was moved from");
  }
  inputs_->advance();
}

FusedEmbeddingBagCollection::FusedEmbeddingBagCollection(
    std::vector<EmbeddingBagConfig> tables, const embedding::FusedOptimizer& optimizer,
    const EmbeddingBagCollectionOptions& options)
    : EmbeddingBagCollectionBase(TableSet(std::move(tables), options)) {
  const EmbeddingBagCollection collection(this->tables().configs(), options);
  ShardOptions shard_options{.optimizer = optimizer};
  if (!options.device.is_meta()) shard_options.device = options.device;
  tables_alone_ = std::make_shared<ShardedTables>(collection, plan_alone(this->tables()),
                                                  dist::Mesh(), shard_options);
  for (const LocalTable& table : tables_alone_->local()) register_weight(table.name, table.weight);
}
FusedEmbeddingBagCollection::~FusedEmbeddingBagCollection() = default;

const embedding::FusedOptimizer& FusedEmbeddingBagCollection::optimizer() const {
  return *tables_alone_->optimizer();
}

void FusedEmbeddingBagCollection::set_optimizer(const embedding::FusedOptimizer& optimizer) {
  tables_alone_->set_optimizer(optimizer);
}

std::shared_ptr<registry::FusedUpdates> FusedEmbeddingBagCollection::fused_updates() const {
  return embedding::fused_updates(tables_alone_);
}

KeyedTensor FusedEmbeddingBagCollection::forward(const KeyedJaggedTensor& batch) {
  return tables().named(tables_alone_->forward(tables_alone_->start(batch)));
}

std::shared_ptr<ShardedEmbeddingBagCollection> shard(const EmbeddingBagCollectionBase& collection,
                                                     const TablePlan& plan, const dist::Mesh& mesh,
                                                     const ShardOptions& options) {
  if (dynamic_cast<const ShardedEmbeddingBagCollection*>(&collection) != nullptr) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "collection for tessera::shard",
                          "whole tables", "a collection that is sharded already");
  }
  auto sharded = std::make_shared<ShardedEmbeddingBagCollection>(collection, plan, mesh, options);
  embedding::attach_state_dict_hooks(*sharded, sharded->sharded_);
  note_mesh_around_tables(*sharded, mesh);
  registry::note_applied(*sharded, "shard", mesh);
  if (mesh.world_size() > 1) {
    registry::attach(*sharded, sharded->sharded_->meeting_point());
  }
  return sharded;
}

std::optional<TensorMeta> global_meta(const at::Tensor& parameter) {
  const auto shard = registry::find_shard(parameter);
  if (!shard) return std::nullopt;
  return shard->whole;
}

}  // namespace tessera
