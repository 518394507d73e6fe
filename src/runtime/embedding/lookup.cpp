#include "runtime/embedding/lookup.h"

#include <torch/types.h>

#include <algorithm>

#include "embedding_kernels/fused_update.h"
#include "tessera/base/error.h"

namespace tessera::embedding {
namespace {

using at::Tensor;

/// Throws if a weight no longer has the shape, dtype and device that `shard` gave it, or is not
/// contiguous. Does not see that a tensor of the same kind has replaced it.
void check_memory(const LocalTable& table) {
  const Shape& shape = table.region.sizes;
  const at::Device device = table.cache ? at::Device(at::kCPU) : table.device;
  const bool is_sound = table.weight.sizes() == at::IntArrayRef(shape) &&
                        table.weight.is_contiguous() && table.weight.device() == device &&
                        table.weight.scalar_type() == table.dtype;
  if (is_sound) return;
  throw Error::expected(
      ErrorKind::invalid_argument, {.fqn = table.name}, "weight of a table",
      c10::str("the contiguous shard ", shape_to_string(shape), " of ", table.dtype,
               " that tessera::shard made on ", device),
      c10::str(table.weight.scalar_type(), " of shape ", table.weight.sizes(), " and strides ",
               table.weight.strides(), " on ", table.weight.device()),
      table.weight.device() == device ? "" : "do not call Module::to on tables");
}

/// Returns the optimizer without clipping and weight decay, which apply only to sums of all ranks.
FusedOptimizer without_changes_to_gradients(FusedOptimizer optimizer) {
  std::visit([](auto& each) { each.max_gradient = each.weight_decay = 0; }, optimizer);
  return optimizer;
}

bool splits_rows(const LocalTable& table) {
  return table.rule.sharding == TableSharding::column_wise ||
         table.rule.sharding == TableSharding::table_column_wise ||
         (table.rule.sharding == TableSharding::grid && table.rule.num_column_shards > 1);
}

bool has_peer(const LocalTable& table, int rank) {
  return std::ranges::find(table.column_peers, rank) != table.column_peers.end();
}

/// Returns the position of a rank among the ranks that hold columns of the same rows.
std::size_t place_of(const LocalTable& table, int rank) {
  return static_cast<std::size_t>(std::ranges::find(table.column_peers, rank) -
                                  table.column_peers.begin());
}

}  // namespace

bool takes_steps(const LocalTable& table) {
  return table.kernel == Kernel::fused && table.weight.requires_grad() && table.is_in_backward;
}

Lookup::Lookup(const std::vector<Assignment>& assignments, PooledColumns columns,
               std::vector<LocalTable>& tables, std::shared_ptr<dist::Group> group,
               at::Device device)
    : columns_(std::move(columns)),
      group_(std::move(group)),
      device_(device),
      kernels_(table_kernels_for(device)) {
  for (const Assignment& each : assignments) {
    table_of_feature_.insert(table_of_feature_.end(), each.outputs.size(),
                             static_cast<int>(looked_.size()));
    looked_.push_back(&tables[each.table]);
  }
  splits_rows_ = std::ranges::any_of(tables, [](const LocalTable& table) {
    return table.kernel == Kernel::fused && splits_rows(table);
  });
}

std::vector<TableTensors> Lookup::tensors() const {
  std::vector<TableTensors> tensors;
  for (const LocalTable* const table : looked_) {
    check_memory(*table);
    tensors.push_back(table->cache ? table->cache->tensors(table->state.step)
                                   : TableTensors{table->weight, &table->state});
  }
  return tensors;
}

FeatureBags Lookup::view(const LocalBags& bags) const {
  return {table_of_feature_, columns_.first, bags.num_samples,  bags.ids,
          bags.offsets,      bags.weights,   bags.output_begins};
}

void Lookup::pooled(const LocalBags& bags, Tensor& to) const {
  kernels_->pooled(tensors(), view(bags), to);
}

Tensor Lookup::sample_weight_gradients(const LocalBags& bags, const Tensor& gradient) const {
  return kernels_->sample_weight_gradients(tensors(), view(bags),
                                           {gradient.view({bags.num_samples, width()})});
}

void Lookup::add_dense(std::size_t looked, TableBackward& backward,
                       std::vector<Tensor>& gradients) {
  const LocalTable& table = *looked_[looked];
  Tensor dense = backward.dense_gradient(static_cast<int>(looked));
  if (table.is_replicated()) {
    group_->all_reduce(dense, "gradient of table " + table.name).wait();
  }
  gradients[table.table] = dense.to(table.weight.scalar_type());
}

/// Updates the sharded tables whose update needs no data of other ranks, because this rank holds
/// whole rows or the optimizer works per element.
void Lookup::step_shards(TableBackward& backward, const FusedOptimizer& optimizer) {
  std::vector<int> tables;
  for (std::size_t i = 0; i < looked_.size(); ++i) {
    const LocalTable& table = *looked_[i];
    if (!takes_steps(table) || table.is_replicated()) continue;
    if (is_row_wise(optimizer) && table.column_peers.size() > 1) continue;
    tables.push_back(static_cast<int>(i));
  }
  backward.fused_update(tables, optimizer);
}

std::vector<Lookup::SplitTable> Lookup::split_tables(TableBackward& backward,
                                                     const FusedOptimizer& optimizer) const {
  std::vector<SplitTable> split;
  for (std::size_t i = 0; i < looked_.size(); ++i) {
    const LocalTable& table = *looked_[i];
    if (!takes_steps(table) || table.column_peers.size() < 2) continue;
    SplitTable& each =
        split.emplace_back(i, backward.row_gradients(static_cast<int>(i), optimizer));
    for (const int peer : table.column_peers) {
      const Tensor& own = each.gradients.squares;
      each.squares.push_back(peer == group_->rank() ? own : torch::empty_like(own));
    }
  }
  return split;
}

/// Sends the sum of squares of each row's gradient to the ranks that hold the other columns of the
/// table, and receives their sums. These ranks have the same touched rows.
void Lookup::exchange_squares(std::vector<SplitTable>& split) {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(group_->size()));
  std::vector<Tensor> sent, received;
  for (int rank = 0; rank < group_->size(); ++rank) {
    if (rank == group_->rank()) continue;
    for (const SplitTable& each : split) {
      const LocalTable& table = *looked_[each.looked];
      if (!has_peer(table, rank)) continue;
      sent.push_back(each.gradients.squares);
      received.push_back(each.squares[place_of(table, rank)]);
      sizes[static_cast<std::size_t>(rank)] += sent.back().numel();
    }
  }
  const Tensor to_all = sent.empty()
                            ? torch::empty({0}, at::TensorOptions(device_).dtype(at::kFloat))
                            : torch::cat(sent);
  Tensor from_all = torch::empty_like(to_all);
  group_->all_to_all(from_all, sizes, to_all, sizes, "squares of gradients").wait();
  std::int64_t begin = 0;
  for (Tensor& squares : received) {
    squares.copy_(from_all.narrow(0, begin, squares.numel()));
    begin += squares.numel();
  }
}

/// Updates the tables that are cut by columns, for a row-wise optimizer. All ranks must call it.
void Lookup::step_split_rows(TableBackward& backward, const FusedOptimizer& optimizer) {
  std::vector<SplitTable> split = split_tables(backward, optimizer);
  exchange_squares(split);
  for (SplitTable& each : split) {
    Tensor whole = each.squares.front().clone();
    for (std::size_t i = 1; i < each.squares.size(); ++i) whole += each.squares[i];
    backward.apply_row_gradients(static_cast<int>(each.looked), optimizer,
                                 {each.gradients.rows, whole}, looked_[each.looked]->num_columns);
  }
}

/// Updates a table that every rank has in full, with the gradients of all ranks.
void Lookup::step_replica(std::size_t looked, TableBackward& backward,
                          const FusedOptimizer& optimizer) {
  const LocalTable& table = *looked_[looked];
  const std::int64_t width = table.weight.size(1);
  const Tensor own_rows = backward.touched_rows(static_cast<int>(looked));
  const Tensor gradients =
      backward.row_gradients(static_cast<int>(looked), without_changes_to_gradients(optimizer))
          .rows.view({-1});
  const auto num_ranks = static_cast<std::size_t>(group_->size());
  const std::string what = "gradients of table " + table.name;
  Tensor counts = torch::empty({group_->size()}, at::kLong);
  group_->all_gather(counts, torch::full({1}, own_rows.numel(), at::kLong), what).wait();
  std::vector<std::int64_t> received(counts.const_data_ptr<std::int64_t>(),
                                     counts.const_data_ptr<std::int64_t>() + num_ranks);
  const auto exchange = [&](const Tensor& own, std::int64_t width_of_row) {
    std::vector<std::int64_t> num_received = received;
    for (std::int64_t& each : num_received) each *= width_of_row;
    const std::vector<std::int64_t> num_sent(num_ranks, own.numel());
    Tensor all = torch::empty({sum_of(num_received)}, own.options());
    group_->all_to_all(all, num_received, own.repeat({group_->size()}), num_sent, what).wait();
    return all;
  };
  const Tensor all_rows = exchange(own_rows, 1);
  const Tensor all_gradients = exchange(gradients, width).view({-1, width});
  const int only_table = 0;
  const std::int64_t first_column = 0;
  const FeatureBags one_row_each{{&only_table, 1},
                                 {&first_column, 1},
                                 all_rows.numel(),
                                 all_rows,
                                 torch::arange(all_rows.numel() + 1, at::kLong),
                                 {},
                                 {}};
  // Uses new kernels: a second backward of this Lookup's kernels would make `backward` invalid.
  const auto kernels = cpu_table_kernels();
  kernels->backward({{table.weight, &table.state}}, one_row_each, {all_gradients})
      ->fused_update({&only_table, 1}, optimizer);
}

/// Updates a table that every rank has. Sums gradients of the whole table over the ranks, because
/// the host does not know how many rows are touched.
void Lookup::step_replica_on_device(std::size_t looked, TableBackward& backward,
                                    const FusedOptimizer& optimizer) {
  const LocalTable& table = *looked_[looked];
  // An additional last column counts the ranks that have looked up a row in this batch.
  Tensor sums = torch::zeros({table.weight.size(0), table.weight.size(1) + 1},
                             table.weight.options().dtype(at::kFloat).requires_grad(false));
  sums.narrow(1, 0, table.weight.size(1)).copy_(backward.dense_gradient(static_cast<int>(looked)));
  const Tensor is_touched = sums.select(1, table.weight.size(1));
  is_touched.index_fill_(0, backward.touched_rows(static_cast<int>(looked)), 1);
  group_->all_reduce(sums, "gradient of table " + table.name).wait();
  masked_update({table.weight, &table.state}, optimizer, sums.narrow(1, 0, table.weight.size(1)),
                is_touched.gt(0));
}

void Lookup::backward(const LocalBags& bags, const Tensor& gradient,
                      const FusedOptimizer* optimizer, std::vector<Tensor>& gradients) {
  const auto backward = kernels_->backward(
      tensors(), view(bags),
      {gradient.view({bags.num_samples, width()}), 1 / static_cast<float>(group_->size())});
  for (std::size_t i = 0; i < looked_.size(); ++i) {
    const LocalTable& table = *looked_[i];
    if (table.kernel == Kernel::dense && table.weight.requires_grad()) {
      add_dense(i, *backward, gradients);
    }
  }
  if (optimizer == nullptr) return;
  step_shards(*backward, *optimizer);
  if (splits_rows_ && is_row_wise(*optimizer)) step_split_rows(*backward, *optimizer);
  for (std::size_t i = 0; i < looked_.size(); ++i) {
    if (!takes_steps(*looked_[i]) || !looked_[i]->is_replicated()) continue;
    if (device_.is_cpu()) {
      step_replica(i, *backward, *optimizer);
    } else {
      step_replica_on_device(i, *backward, *optimizer);
    }
  }
}

}  // namespace tessera::embedding
