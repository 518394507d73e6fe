#include "embedding_kernels/fused_update.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <type_traits>
#include <variant>
#include <vector>

#include "base/checked_math.h"
#include "embedding_kernels/instruction_sets.h"
#include "embedding_kernels/row_range.h"
#include "tessera/base/parallel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "embedding_kernels/fused_update.cpp"
#include <hwy/foreach_target.h>

#include "embedding_kernels/rows-inl.h"
#include "embedding_kernels/update_rules-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::embedding::HWY_NAMESPACE {

/// The input of sum_rows: for each occurrence of a row (a position in the batch that has the row's
/// id), the weight of the occurrence and the gradient of the bag that contains it.
struct BagGradients {
  const float* data;
  std::int64_t stride;
  std::int64_t first_column;
  const TouchedRows::Occurrence* occurrences;
  std::int64_t end;
  std::int64_t ahead;

  explicit BagGradients(const TableGradient& table)
      : data(table.pooled.data),
        stride(table.pooled.stride),
        first_column(table.first_column),
        occurrences(table.touched.occurrences.data()),
        end(table.touched.num_occurrences()),
        ahead(rows_ahead<float>(table.dim)) {}

  const float* row(std::int64_t i) const {
    return data + static_cast<std::int64_t>(occurrences[i].sample) * stride +
           (static_cast<std::int64_t>(occurrences[i].column) - first_column);
  }
  const float* row_ahead(std::int64_t i) const { return row(HWY_MIN(i + ahead, end - 1)); }
  float weight(std::int64_t i) const { return occurrences[i].weight; }
};

/// Gives sum_rows the block sums of one hot row, see [Note: Order of sums].
struct BlockSums {
  const float* data;
  std::int64_t dim;

  const float* row(std::int64_t i) const { return data + i * dim; }
  const float* row_ahead(std::int64_t i) const { return row(i); }
  float weight(std::int64_t /*i*/) const { return 1; }
};

void sum_block(const TableGradient& table, std::int64_t begin, std::int64_t end, float* out) {
  sum_rows(BagGradients(table), begin, end, table.dim, out);
}

// Writes the sum of a row's gradients to `g`. Not inline: a call costs little, and a copy in each
// kind of update would compile slowly.
HWY_NOINLINE void sum_row(const TableGradient& table, const BagGradients& bags, std::int64_t index,
                          float* g) {
  const std::int64_t begin = table.touched.begin_of(index);
  const std::int64_t end = table.touched.end_of(index);
  if (end - begin <= TouchedRows::kBlockOccurrences) {
    sum_rows(bags, begin, end, table.dim, g);
  } else {
    const std::int64_t first_block = table.touched.first_block_of(index);
    const BlockSums blocks{.data = table.block_sums + first_block * table.dim, .dim = table.dim};
    sum_rows(blocks, 0, TouchedRows::num_blocks_of(end - begin), table.dim, g);
  }
}

/// Returns v clamped to [-limit, limit]; NaN stays NaN.
template <class D>
HWY_INLINE hn::Vec<D> clipped(D d, hn::Vec<D> v, float limit) {
  const auto most = hn::Set(d, limit);
  const auto least = hn::Set(d, -limit);
  const auto not_above = hn::IfThenElse(hn::Gt(v, most), most, v);
  return hn::IfThenElse(hn::Lt(not_above, least), least, not_above);
}

template <class T>
HWY_NOINLINE void finish_gradient(const GradientRule& rule, const T* w, float* g,
                                  std::int64_t dim) {
  if (rule.scale == 1 && rule.max_gradient == 0 && rule.weight_decay == 0) return;
  for_columns(dim, [&](auto d, std::int64_t column) HWY_ATTR {
    auto v = hn::Mul(hn::Set(d, rule.scale), load(d, g + column));
    if (rule.max_gradient > 0) v = clipped(d, v, rule.max_gradient);
    if (rule.weight_decay != 0) {
      v = hn::MulAdd(hn::Set(d, rule.weight_decay), load(d, w + column), v);
    }
    store(d, v, g + column);
  });
}

/// Gives an update the weights of a touched row, and prefetches a later row of the same range.
template <class T>
struct UpdatedRows {
  T* weights;
  std::int64_t dim;
  const std::int64_t* rows;
  std::int64_t end;
  std::int64_t ahead;

  UpdatedRows(T* table_weights, const TableGradient& table, const RowRange& range)
      : weights(table_weights),
        dim(table.dim),
        rows(table.touched.rows.data()),
        end(range.end),
        ahead(rows_ahead<T>(table.dim)) {}

  T* row(std::int64_t index) const { return weights + rows[index] * dim; }

  template <class Rule>
  HWY_INLINE void prefetch(std::int64_t index, const Rule& rule) const {
    const std::int64_t next = HWY_MIN(index + ahead, end - 1);
    prefetch_to_write(row(next), dim);
    rule.prefetch(rows[next], dim);
  }
};

void update_range(const TableUpdate& update, const TableGradient& table,
                  const GradientRule& gradient_rule, const RowRange& range, float* g) {
  with_weights(update.view, [&]<class T>(T* weights) HWY_ATTR {
    std::visit(
        [&](const auto& optimizer) HWY_ATTR {
          const auto rule = rule_of(optimizer, update.state);
          const BagGradients bags(table);
          const UpdatedRows<T> rows(weights, table, range);
          for (std::int64_t i = range.begin; i < range.end; ++i) {
            rows.prefetch(i, rule);
            sum_row(table, bags, i, g);
            T* w = rows.row(i);
            finish_gradient(gradient_rule, w, g, table.dim);
            float mean_square = 0;
            if constexpr (decltype(rule)::kIsRowWise) {
              mean_square = product(g, g, table.dim) / static_cast<float>(table.dim);
            }
            rule.update(w, g, rows.rows[i], table.dim, mean_square);
          }
        },
        update.optimizer);
  });
}

void write_gradients(const TableUpdate& update, const TableGradient& table,
                     const GradientRule& gradient_rule, const RowRange& range, float* gradients,
                     float* squares) {
  with_weights(update.view, [&]<class T>(T* weights) HWY_ATTR {
    const BagGradients bags(table);
    const UpdatedRows<T> rows(weights, table, range);
    for (std::int64_t i = range.begin; i < range.end; ++i) {
      float* g = gradients + i * table.dim;
      sum_row(table, bags, i, g);
      finish_gradient(gradient_rule, rows.row(i), g, table.dim);
      squares[i] = product(g, g, table.dim);
    }
  });
}

void apply_gradients(const TableUpdate& update, const TableGradient& table, const RowRange& range,
                     const float* gradients, const float* squares, std::int64_t row_width) {
  with_weights(update.view, [&]<class T>(T* weights) HWY_ATTR {
    std::visit(
        [&](const auto& optimizer) HWY_ATTR {
          const auto rule = rule_of(optimizer, update.state);
          const UpdatedRows<T> rows(weights, table, range);
          for (std::int64_t i = range.begin; i < range.end; ++i) {
            rows.prefetch(i, rule);
            const float mean_square = squares[i] / static_cast<float>(row_width);
            rule.update(rows.row(i), gradients + i * table.dim, rows.rows[i], table.dim,
                        mean_square);
          }
        },
        update.optimizer);
  });
}

void add_range(const TableGradient& table, const RowRange& range, float* g, float* out) {
  const BagGradients bags(table);
  const GradientRule scaling{.scale = table.pooled.scale};
  for (std::int64_t i = range.begin; i < range.end; ++i) {
    sum_row(table, bags, i, g);
    float* out_row = out + table.touched.rows[static_cast<std::size_t>(i)] * table.dim;
    finish_gradient(scaling, out_row, g, table.dim);
    for_columns(table.dim, [&](auto d, std::int64_t column) HWY_ATTR {
      store(d, hn::Add(load(d, out_row + column), load(d, g + column)), out_row + column);
    });
  }
}

}  // namespace tessera::embedding::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::embedding {
namespace {

HWY_EXPORT(sum_block);
HWY_EXPORT(update_range);
HWY_EXPORT(write_gradients);
HWY_EXPORT(apply_gradients);
HWY_EXPORT(add_range);

constexpr std::int64_t kTaskOccurrences = 4096;

template <class Optimizer>
constexpr bool kIsAdam = std::is_same_v<Optimizer, Adam> || std::is_same_v<Optimizer, RowWiseAdam>;

GradientRule gradient_rule(const FusedOptimizer& optimizer, const PooledGradient& gradient) {
  return std::visit(
      [&]<class Optimizer>(const Optimizer& chosen) {
        return GradientRule{
            .scale = gradient.scale,
            .max_gradient = static_cast<float>(chosen.max_gradient),
            .weight_decay = kIsAdam<Optimizer> ? 0 : static_cast<float>(chosen.weight_decay)};
      },
      optimizer);
}

/// The gradients of several tables' touched rows. `sum_hot_rows` sums each block of occurrences of
/// their hot rows, which occur more than kBlockOccurrences times ([Note: Order of sums]).
class SummedGradients {
 public:
  void add(const TouchedRows::OfTable& touched, std::int64_t dim, const PooledGradient& gradient) {
    tables_.push_back({.touched = touched,
                       .dim = dim,
                       .pooled = gradient,
                       .first_column = 0,
                       .block_sums = nullptr});
  }

  void sum_hot_rows(int num_threads);

  /// Cuts the touched rows of every table into ranges and calls `body(i, table, range)` for each
  /// range, in parallel. `i`: the number of the table. Each touched row is in one range. The ranges
  /// have about equally many occurrences (ids in the batch).
  template <class Body>
  void for_ranges(int num_threads, const Body& body) const;

 private:
  struct Block {
    std::size_t table;
    std::int64_t begin;  // index of the block's first occurrence
    std::int64_t end;
    float* sum;
  };

  std::vector<Block> lay_out_blocks();

  std::vector<TableGradient> tables_{};
  std::vector<float> block_sums_{};
};

std::vector<SummedGradients::Block> SummedGradients::lay_out_blocks() {
  std::int64_t numel = 0;
  for (const TableGradient& table : tables_) numel += table.touched.num_blocks * table.dim;
  block_sums_.resize(static_cast<std::size_t>(numel));

  std::vector<Block> blocks;
  float* sum = block_sums_.data();
  for (std::size_t i = 0; i < tables_.size(); ++i) {
    TableGradient& table = tables_[i];
    table.block_sums = sum;
    for (const TouchedRows::HotRow& hot : table.touched.hot_rows) {
      const std::int64_t end = table.touched.end_of(hot.index);
      for (std::int64_t begin = table.touched.begin_of(hot.index); begin < end;
           begin += TouchedRows::kBlockOccurrences) {
        const std::int64_t block_end = std::min(begin + TouchedRows::kBlockOccurrences, end);
        blocks.push_back({.table = i, .begin = begin, .end = block_end, .sum = sum});
        sum += table.dim;
      }
    }
  }
  return blocks;
}

void SummedGradients::sum_hot_rows(int num_threads) {
  const std::vector<Block> blocks = lay_out_blocks();
  parallel_for(static_cast<std::int64_t>(blocks.size()), num_threads, {}, [&](std::int64_t i) {
    const Block& block = blocks[static_cast<std::size_t>(i)];
    HWY_DYNAMIC_DISPATCH(sum_block)(tables_[block.table], block.begin, block.end, block.sum);
  });
}

/// The occurrences, sorted by row, are divided into tasks of `kTaskOccurrences`. Returns the rows
/// whose first occurrence is in task number `task`.
RowRange rows_of_task(const TouchedRows::OfTable& touched, std::int64_t task) {
  const auto index_of = [&](std::int64_t occurrence) {
    const auto begins = touched.offsets.first(touched.rows.size());
    return std::ranges::lower_bound(begins, occurrence) - begins.begin();
  };
  return {.begin = index_of(task * kTaskOccurrences),
          .end = index_of((task + 1) * kTaskOccurrences)};
}

/// A copy of the gradient of one table's bags, without the columns of other tables. The copy is
/// faster to read. Rows of the original may be pages apart; then they compete for a few cache sets,
/// and each needs a TLB entry.
class GradientWithoutGaps {
 public:
  /// Returns `table`. If `num_occurrences` is so large that a copy of the gradient saves time, the
  /// gradient in the result is such a copy, without gaps.
  const TableGradient& of(const TableGradient& table, std::int64_t num_occurrences) {
    constexpr std::int64_t kMinReads = 4;  // reads per copied element for which a copy pays
    const TouchedRows::Columns& columns = table.touched.columns;
    const std::int64_t num_used = num_occurrences * table.dim;
    const std::int64_t num_copied = table.touched.num_samples * columns.numel();
    const bool has_gaps = table.pooled.data != nullptr && columns.numel() < table.pooled.stride;
    if (!has_gaps || num_used < kMinReads * num_copied) return table;
    copy_.resize(static_cast<std::size_t>(num_copied));
    const float* from = table.pooled.data + columns.begin;
    for (std::int64_t sample = 0; sample < table.touched.num_samples; ++sample) {
      std::copy_n(from + sample * table.pooled.stride, columns.numel(),
                  copy_.data() + sample * columns.numel());
    }
    table_ = table;
    table_.pooled.data = copy_.data();
    table_.pooled.stride = columns.numel();
    table_.first_column = columns.begin;
    return table_;
  }

 private:
  std::vector<float> copy_;
  TableGradient table_{};
};

// If there are enough tables, each thread begins with a different table. A thread that has finished
// a table helps with the others.
template <class Body>
void SummedGradients::for_ranges(int num_threads, const Body& body) const {
  const std::size_t num_tables = tables_.size();
  std::vector<std::int64_t> num_tasks;
  for (const TableGradient& table : tables_) {
    num_tasks.push_back(ceil_div(table.touched.num_occurrences(), kTaskOccurrences));
  }
  std::vector<std::atomic<std::int64_t>> next(num_tables);
  const std::int64_t num_workers =
      std::min<std::int64_t>(num_threads, std::reduce(num_tasks.begin(), num_tasks.end()));
  // How many threads begin with the same table, if there are more threads than tables.
  const std::int64_t num_sharers =
      ceil_div(num_workers, std::max<std::int64_t>(static_cast<std::int64_t>(num_tables), 1));
  parallel_for(num_workers, num_threads, {}, [&](std::int64_t worker) {
    GradientWithoutGaps without_gaps;
    const auto first =
        static_cast<std::size_t>(worker) * num_tables / static_cast<std::size_t>(num_workers);
    for (std::size_t i = 0; i < num_tables; ++i) {
      const std::size_t number = (first + i) % num_tables;
      std::int64_t task = next[number]++;
      if (task >= num_tasks[number]) continue;
      const std::int64_t num_left =
          tables_[number].touched.num_occurrences() - task * kTaskOccurrences;
      const TableGradient& table = without_gaps.of(tables_[number], num_left / num_sharers);
      for (; task < num_tasks[number]; task = next[number]++) {
        body(number, table, rows_of_task(table.touched, task));
      }
    }
  });
}

SummedGradients summed_gradients(const TouchedRows::OfTable& touched, std::int64_t dim,
                                 const PooledGradient& gradient, int num_threads) {
  SummedGradients gradients;
  gradients.add(touched, dim, gradient);
  gradients.sum_hot_rows(num_threads);
  return gradients;
}

}  // namespace

void fused_update(std::span<const TableUpdate> updates, const TouchedRows& touched,
                  const PooledGradient& gradient, int num_threads) {
  SummedGradients gradients;
  std::vector<GradientRule> rules;
  for (const TableUpdate& update : updates) {
    gradients.add(touched[update.table], update.view.dim, gradient);
    rules.push_back(gradient_rule(update.optimizer, gradient));
  }
  gradients.sum_hot_rows(num_threads);
  gradients.for_ranges(
      num_threads, [&](std::size_t i, const TableGradient& table, const RowRange& range) {
        std::vector<float> g(static_cast<std::size_t>(updates[i].view.dim));
        HWY_DYNAMIC_DISPATCH(update_range)(updates[i], table, rules[i], range, g.data());
      });
}

bool is_row_wise(const FusedOptimizer& optimizer) {
  return std::holds_alternative<RowWiseAdagrad>(optimizer) ||
         std::holds_alternative<RowWiseAdam>(optimizer);
}

void row_gradients(const TableUpdate& update, const TouchedRows& touched,
                   const PooledGradient& gradient, float* gradients, float* squares,
                   int num_threads) {
  const SummedGradients sums =
      summed_gradients(touched[update.table], update.view.dim, gradient, num_threads);
  const GradientRule rule = gradient_rule(update.optimizer, gradient);
  sums.for_ranges(
      num_threads, [&](std::size_t /*i*/, const TableGradient& summed, const RowRange& range) {
        HWY_DYNAMIC_DISPATCH(write_gradients)(update, summed, rule, range, gradients, squares);
      });
}

void apply_row_gradients(const TableUpdate& update, const TouchedRows& touched,
                         const float* gradients, const float* squares, std::int64_t row_width,
                         int num_threads) {
  SummedGradients table;
  table.add(touched[update.table], update.view.dim, {});
  table.for_ranges(num_threads, [&](std::size_t /*i*/, const TableGradient& touched_rows,
                                    const RowRange& range) {
    HWY_DYNAMIC_DISPATCH(apply_gradients)
    (update, touched_rows, range, gradients, squares, row_width);
  });
}

void add_dense_gradient(const TouchedRows& touched, int table, std::int64_t dim,
                        const PooledGradient& gradient, float* out, int num_threads) {
  const SummedGradients sums = summed_gradients(touched[table], dim, gradient, num_threads);
  sums.for_ranges(num_threads,
                  [&](std::size_t /*i*/, const TableGradient& summed, const RowRange& range) {
                    std::vector<float> g(static_cast<std::size_t>(dim));
                    HWY_DYNAMIC_DISPATCH(add_range)(summed, range, g.data(), out);
                  });
}

}  // namespace tessera::embedding
#endif  // HWY_ONCE
