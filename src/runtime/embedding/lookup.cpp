#include "runtime/embedding/lookup.h"

#include <ATen/Parallel.h>
#include <torch/types.h>

#include <algorithm>

#include "embedding_kernels/pooled.h"
#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"

namespace tessera::embedding {
namespace {

using at::Tensor;

TableView view_of(const LocalTable& table) {
  return {table.weight.data_ptr(), dtype_of(table.weight.scalar_type()), table.weight.size(0),
          table.weight.size(1)};
}

/// Throws if the user has replaced the parameter's data.
void check_memory(const LocalTable& table) {
  const Shape& shape = table.region.sizes;
  const bool is_sound = table.weight.sizes() == at::IntArrayRef(shape) &&
                        table.weight.is_contiguous() && table.weight.device() == at::kCPU &&
                        table.weight.scalar_type() == table.dtype;
  if (is_sound) return;
  throw Error::expected(
      ErrorKind::invalid_argument, {.fqn = table.name}, "weight of a table",
      "the contiguous shard " + shape_to_string(shape) + " that tessera::shard made on the CPU",
      c10::str(table.weight.scalar_type(), " of shape ", table.weight.sizes(), " and strides ",
               table.weight.strides()));
}

template <class T>
std::span<const T> span_of(const Tensor& tensor) {
  if (!tensor.defined()) return {};
  return {tensor.const_data_ptr<T>(), static_cast<std::size_t>(tensor.numel())};
}

/// Returns the optimizer without clipping and weight decay.
FusedOptimizer without_changes_to_gradients(FusedOptimizer optimizer) {
  std::visit([](auto& each) { each.max_gradient = each.weight_decay = 0; }, optimizer);
  return optimizer;
}

bool splits_rows(const LocalTable& table) {
  return table.rule.sharding == TableSharding::column_wise ||
         table.rule.sharding == TableSharding::table_column_wise ||
         (table.rule.sharding == TableSharding::grid && table.rule.num_column_shards > 1);
}

}  // namespace

bool takes_steps(const LocalTable& table) {
  return table.kernel == Kernel::fused && table.weight.requires_grad();
}

Lookup::Lookup(const std::vector<Assignment>& assignments, PooledColumns columns,
               std::vector<LocalTable>& tables, std::shared_ptr<dist::Group> group)
    : columns_(std::move(columns)), group_(std::move(group)) {
  for (const Assignment& each : assignments) {
    table_of_feature_.insert(table_of_feature_.end(), each.outputs.size(),
                             static_cast<int>(looked_.size()));
    looked_.push_back(&tables[each.table]);
  }
  splits_rows_ = std::ranges::any_of(tables, [](const LocalTable& table) {
    return table.kernel == Kernel::fused && splits_rows(table);
  });
}

std::vector<TableView> Lookup::views() const {
  std::vector<TableView> views;
  for (const LocalTable* const table : looked_) {
    check_memory(*table);
    views.push_back(view_of(*table));
  }
  return views;
}

Bags Lookup::view(const LocalBags& bags) const {
  return {table_of_feature_,
          columns_.first,
          bags.num_samples,
          span_of<std::int64_t>(bags.ids),
          span_of<std::int64_t>(bags.offsets),
          span_of<float>(bags.weights)};
}

void Lookup::pooled(const LocalBags& bags, Tensor& to) const {
  pooled_sums(views(), view(bags), to.mutable_data_ptr<float>(), width(), at::get_num_threads());
}

Tensor Lookup::sample_weight_gradients(const LocalBags& bags, const Tensor& gradient) const {
  Tensor result = torch::zeros({bags.ids.numel()}, at::kFloat);
  embedding::sample_weight_gradients(views(), view(bags),
                                     {gradient.const_data_ptr<float>(), width()},
                                     result.mutable_data_ptr<float>(), at::get_num_threads());
  return result;
}

TableUpdate Lookup::update_of(std::size_t looked, const FusedOptimizer& optimizer) const {
  const LocalTable& table = *looked_[looked];
  const FusedState& state = table.state;
  return {static_cast<int>(looked),
          view_of(table),
          optimizer,
          {state.data("sum"), state.data("row_sum"), state.data("exp_avg"),
           state.data("exp_avg_sq"), state.data("row_exp_avg_sq"), state.step}};
}

void Lookup::add_dense(std::size_t looked, const PooledGradient& gradient,
                       std::vector<Tensor>& gradients) {
  const LocalTable& table = *looked_[looked];
  Tensor dense = torch::zeros(table.weight.sizes(), at::kFloat);
  add_dense_gradient(touched_, static_cast<int>(looked), table.weight.size(1), gradient,
                     dense.mutable_data_ptr<float>(), at::get_num_threads());
  if (table.is_replicated()) {
    group_->all_reduce(dense, "gradient of table " + table.name).wait();
  }
  gradients[table.table] = dense.to(table.weight.scalar_type());
}

/// Updates the sharded tables that need nothing from other ranks: this rank holds whole rows, or
/// the optimizer works per element.
void Lookup::step_shards(const PooledGradient& gradient, const FusedOptimizer& optimizer) {
  std::vector<TableUpdate> updates;
  for (std::size_t i = 0; i < looked_.size(); ++i) {
    const LocalTable& table = *looked_[i];
    if (!takes_steps(table) || table.is_replicated()) continue;
    if (is_row_wise(optimizer) && table.column_peers.size() > 1) continue;
    updates.push_back(update_of(i, optimizer));
  }
  fused_update(updates, touched_, gradient, at::get_num_threads());
}

/// Updates the tables whose columns are on several ranks, if the optimizer needs whole rows.
void Lookup::step_split_rows(const PooledGradient& gradient, const FusedOptimizer& optimizer) {
  struct SplitTable {
    std::size_t looked;
    Tensor gradients;             // [touched rows, columns]
    std::vector<Tensor> squares;  // for each peer, in their order: [touched rows]
  };
  std::vector<SplitTable> split;
  for (std::size_t i = 0; i < looked_.size(); ++i) {
    const LocalTable& table = *looked_[i];
    if (!takes_steps(table) || table.column_peers.size() < 2) continue;
    const std::int64_t num_rows = touched_[static_cast<int>(i)].num_rows();
    SplitTable& each = split.emplace_back();
    each.looked = i;
    each.gradients = torch::empty({num_rows, table.weight.size(1)}, at::kFloat);
    const Tensor own = torch::empty({num_rows}, at::kFloat);
    row_gradients(update_of(i, optimizer), touched_, gradient,
                  each.gradients.mutable_data_ptr<float>(), own.mutable_data_ptr<float>(),
                  at::get_num_threads());
    for (const int peer : table.column_peers) {
      each.squares.push_back(peer == group_->rank() ? own : torch::empty({num_rows}, at::kFloat));
    }
  }
  // Sends each peer the squares of the tables that both have, in order. Sender and receiver have
  // the same tables and touched rows.
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(group_->size()));
  std::vector<Tensor> sent;
  for (int rank = 0; rank < group_->size(); ++rank) {
    if (rank == group_->rank()) continue;
    for (const SplitTable& each : split) {
      const auto& peers = looked_[each.looked]->column_peers;
      if (std::ranges::find(peers, rank) == peers.end()) continue;
      const auto own = std::ranges::find(peers, group_->rank()) - peers.begin();
      sent.push_back(each.squares[static_cast<std::size_t>(own)]);
      sizes[static_cast<std::size_t>(rank)] += sent.back().numel();
    }
  }
  const Tensor to_all = sent.empty() ? torch::empty({0}, at::kFloat) : torch::cat(sent);
  Tensor from_all = torch::empty_like(to_all);
  group_->all_to_all(from_all, sizes, to_all, sizes, "squares of gradients").wait();
  std::int64_t begin = 0;
  for (int rank = 0; rank < group_->size(); ++rank) {
    if (rank == group_->rank()) continue;
    for (SplitTable& each : split) {
      const auto& peers = looked_[each.looked]->column_peers;
      const auto peer = std::ranges::find(peers, rank);
      if (peer == peers.end()) continue;
      Tensor& squares = each.squares[static_cast<std::size_t>(peer - peers.begin())];
      squares.copy_(from_all.narrow(0, begin, squares.numel()));
      begin += squares.numel();
    }
  }
  for (SplitTable& each : split) {
    const LocalTable& table = *looked_[each.looked];
    Tensor whole = each.squares.front().clone();
    for (std::size_t i = 1; i < each.squares.size(); ++i) whole += each.squares[i];
    apply_row_gradients(update_of(each.looked, optimizer), touched_,
                        each.gradients.const_data_ptr<float>(), whole.const_data_ptr<float>(),
                        table.num_columns, at::get_num_threads());
  }
}

/// Updates a table that every rank has in full, with the gradients of all ranks.
void Lookup::step_replica(std::size_t looked, const PooledGradient& gradient,
                          const FusedOptimizer& optimizer) {
  const LocalTable& table = *looked_[looked];
  const std::int64_t width = table.weight.size(1);
  const auto rows = touched_[static_cast<int>(looked)].rows;
  const auto num_rows = static_cast<std::int64_t>(rows.size());
  Tensor gradients = torch::empty({num_rows * width}, at::kFloat);
  const Tensor squares = torch::empty({num_rows}, at::kFloat);
  row_gradients(update_of(looked, without_changes_to_gradients(optimizer)), touched_, gradient,
                gradients.mutable_data_ptr<float>(), squares.mutable_data_ptr<float>(),
                at::get_num_threads());
  const auto num_ranks = static_cast<std::size_t>(group_->size());
  const std::string what = "gradients of table " + table.name;
  Tensor counts = torch::empty({group_->size()}, at::kLong);
  group_->all_gather(counts, torch::full({1}, num_rows, at::kLong), what).wait();
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
  Tensor own_rows = torch::empty({num_rows}, at::kLong);
  std::ranges::copy(rows, own_rows.mutable_data_ptr<std::int64_t>());
  const Tensor all_rows = exchange(own_rows, 1);
  const Tensor all_gradients = exchange(gradients, width);
  const Tensor offsets = torch::arange(all_rows.numel() + 1, at::kLong);
  const int only_table = 0;
  const std::int64_t first_column = 0;
  const TableView table_view = view_of(table);
  const Bags one_row_each{{&only_table, 1},
                          {&first_column, 1},
                          all_rows.numel(),
                          span_of<std::int64_t>(all_rows),
                          span_of<std::int64_t>(offsets),
                          {}};
  const TouchedRows touched = touched_rows({&table_view, 1}, one_row_each, at::get_num_threads());
  TableUpdate update = update_of(looked, optimizer);
  update.table = 0;
  fused_update({&update, 1}, touched, {all_gradients.const_data_ptr<float>(), width},
               at::get_num_threads());
}

void Lookup::backward(const LocalBags& bags, const Tensor& gradient,
                      const FusedOptimizer* optimizer, std::vector<Tensor>& gradients) {
  const PooledGradient pooled{gradient.const_data_ptr<float>(), width(),
                              1 / static_cast<float>(group_->size())};
  touched_.assign(views(), view(bags), at::get_num_threads());
  for (std::size_t i = 0; i < looked_.size(); ++i) {
    const LocalTable& table = *looked_[i];
    if (table.kernel == Kernel::dense && table.weight.requires_grad()) {
      add_dense(i, pooled, gradients);
    }
  }
  if (optimizer == nullptr) return;
  step_shards(pooled, *optimizer);
  if (splits_rows_ && is_row_wise(*optimizer)) step_split_rows(pooled, *optimizer);
  for (std::size_t i = 0; i < looked_.size(); ++i) {
    if (takes_steps(*looked_[i]) && looked_[i]->is_replicated()) {
      step_replica(i, pooled, *optimizer);
    }
  }
}

}  // namespace tessera::embedding
