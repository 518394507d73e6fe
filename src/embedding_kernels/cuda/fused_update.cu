#include <algorithm>
#include <cmath>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "embedding_kernels/cuda/elements.cuh"
#include "embedding_kernels/cuda/kernels.h"

namespace tessera::embedding::cuda {
namespace {

constexpr std::int64_t kBlockOccurrences = embedding::TouchedRows::kBlockOccurrences;
constexpr std::int64_t kSharedNbytes = 48 * 1024;  // default limit for a block of threads

/// One table's update with the optimizer's numbers for the kernels ([Note: Update of a row]).
struct DeviceUpdate {
  enum class Kind { none, sgd, adagrad, row_wise_adagrad, adam, row_wise_adam } kind = Kind::none;
  TableView view{};
  OptimizerState state{};
  float lr = 0, eps = 0, beta1 = 0, beta2 = 0, rest1 = 0, rest2 = 0;
  float correction1 = 0, correction2 = 0;
  float max_gradient = 0;
  float decay_of_gradient = 0;  // weight_decay of an optimizer that adds it to g, else 0
  float decay_of_step = 0;      // weight_decay of an optimizer that adds it later (Adam), else 0
};

DeviceUpdate::Kind kind_of(const FusedOptimizer& optimizer) {
  using Kind = DeviceUpdate::Kind;
  constexpr Kind kKinds[] = {Kind::sgd, Kind::adagrad, Kind::row_wise_adagrad, Kind::adam,
                             Kind::row_wise_adam};
  static_assert(std::is_same_v<FusedOptimizer,
                               std::variant<Sgd, Adagrad, RowWiseAdagrad, Adam, RowWiseAdam>>);
  return kKinds[optimizer.index()];
}

DeviceUpdate on_device(const TableUpdate& update) {
  DeviceUpdate made{.kind = kind_of(update.optimizer), .view = update.view, .state = update.state};
  std::visit(
      [&]<class Optimizer>(const Optimizer& optimizer) {
        made.lr = static_cast<float>(optimizer.lr);
        made.max_gradient = static_cast<float>(optimizer.max_gradient);
        const auto decay = static_cast<float>(optimizer.weight_decay);
        if constexpr (!std::is_same_v<Optimizer, Sgd>) {
          made.eps = static_cast<float>(optimizer.eps);
        }
        if constexpr (std::is_same_v<Optimizer, Adam> || std::is_same_v<Optimizer, RowWiseAdam>) {
          const auto step = static_cast<double>(update.state.step);
          made.beta1 = static_cast<float>(optimizer.beta1);
          made.beta2 = static_cast<float>(optimizer.beta2);
          made.rest1 = static_cast<float>(1 - optimizer.beta1);
          made.rest2 = static_cast<float>(1 - optimizer.beta2);
          made.correction1 = static_cast<float>(1 / (1 - std::pow(optimizer.beta1, step)));
          made.correction2 = static_cast<float>(1 / (1 - std::pow(optimizer.beta2, step)));
          made.decay_of_step = decay;
        } else {
          made.decay_of_gradient = decay;
        }
      },
      update.optimizer);
  return made;
}

/// A touched row, which one warp updates.
struct TouchedRow {
  std::int64_t table;
  std::int64_t row;
  std::int64_t begin;  // index of its first occurrence
  std::int64_t count;

  __device__ TouchedRow(const TouchedRows::View& touched, std::int64_t index)
      : table(static_cast<std::int64_t>(touched.keys[index] >> touched.row_bits)),
        row(static_cast<std::int64_t>(touched.keys[index] &
                                      ((std::uint64_t{1} << touched.row_bits) - 1))),
        begin(touched.offsets[index]),
        count(touched.counts[index]) {}
};

/// Sets `g[0, dim)` to the weighted sum of the gradients of occurrences [begin, end), in order.
__device__ void sum_occurrences(const TouchedRows::View& touched, const PooledGradient& gradient,
                                std::int64_t begin, std::int64_t end, std::int64_t dim, float* g) {
  for (std::int64_t column = lane(); column < dim; column += kWarpThreads) {
    float sum = 0;
#pragma unroll 4
    for (std::int64_t i = begin; i < end; ++i) {
      const TouchedRows::Occurrence& at = touched.occurrences[i];
      const std::int64_t first = at.sample * gradient.stride + at.column;
      sum = fmaf(at.weight, gradient.data[first + column], sum);
    }
    g[column] = sum;
  }
}

/// Returns the touched row that a block belongs to: the last row whose first block is not after
/// `block`.
__device__ std::int64_t row_of_block(const TouchedRows::View& touched, std::uint32_t block) {
  std::int64_t begin = 0;
  std::int64_t end = *touched.num_rows;
  while (end - begin > 1) {
    const std::int64_t middle = begin + (end - begin) / 2;
    if (touched.first_blocks[middle] <= block) {
      begin = middle;
    } else {
      end = middle;
    }
  }
  return begin;
}

/// Sums the blocks of hot rows ([Note: Order of sums]), one block per warp. `dims` is 0 for tables
/// whose sums are not needed.
__global__ void sum_blocks(TouchedRows::View touched, PooledGradient gradient,
                           const std::int64_t* dims, std::int64_t max_dim, float* block_sums) {
  const std::int64_t num_blocks = touched.first_blocks[touched.num_ids];
  for (std::int64_t block = first_item(); block < num_blocks; block += num_warps()) {
    const std::int64_t index = row_of_block(touched, static_cast<std::uint32_t>(block));
    const TouchedRow row(touched, index);
    const std::int64_t begin =
        row.begin + (block - touched.first_blocks[index]) * kBlockOccurrences;
    const std::int64_t end = row.begin + row.count;
    sum_occurrences(touched, gradient, begin,
                    begin + kBlockOccurrences < end ? begin + kBlockOccurrences : end,
                    dims[row.table], block_sums + block * max_dim);
  }
}

/// The inputs from which the gradients of touched rows are computed.
struct GradientSource {
  TouchedRows::View touched;
  PooledGradient gradient;
  const float* block_sums;  // [blocks, max_dim]
  std::int64_t max_dim;
};

__device__ void sum_row(const GradientSource& source, std::int64_t index, const TouchedRow& row,
                        std::int64_t dim, float* g) {
  if (row.count <= kBlockOccurrences) {
    sum_occurrences(source.touched, source.gradient, row.begin, row.begin + row.count, dim, g);
    return;
  }
  const float* blocks =
      source.block_sums +
      static_cast<std::int64_t>(source.touched.first_blocks[index]) * source.max_dim;
  const std::int64_t num_blocks = (row.count + kBlockOccurrences - 1) / kBlockOccurrences;
  for (std::int64_t column = lane(); column < dim; column += kWarpThreads) {
    float sum = 0;
    for (std::int64_t block = 0; block < num_blocks; ++block) {
      sum += blocks[block * source.max_dim + column];
    }
    g[column] = sum;
  }
}

/// Scales and clips the sum `g` of one element, and adds weight decay. Does not use `weight` if the
/// update has no decay of gradients.
__device__ float finish_element(const DeviceUpdate& update, float scale, float weight, float g) {
  float v = scale * g;
  if (update.max_gradient > 0) {
    v = v > update.max_gradient ? update.max_gradient : v;
    v = v < -update.max_gradient ? -update.max_gradient : v;
  }
  return update.decay_of_gradient != 0 ? fmaf(update.decay_of_gradient, weight, v) : v;
}

/// Turns the sum in `g` into the g of [Note: Update of a row]: scales and clips it, and adds weight
/// decay. Returns on every lane the sum of g^2 over all columns that this table has of the row.
template <class T>
__device__ float finish_gradient(const DeviceUpdate& update, float scale, const T* w, float* g) {
  float squares = 0;
  for (std::int64_t k = lane(); k < update.view.dim; k += kWarpThreads) {
    const float weight = update.decay_of_gradient != 0 ? to_float(w[k]) : 0;
    g[k] = finish_element(update, scale, weight, g[k]);
    squares = fmaf(g[k], g[k], squares);
  }
  return sum_over_lanes(squares);
}

/// Values that all columns of a row share: the root by which the step is divided and, if the
/// optimizer has one state per row, this state and its new value.
struct RowStep {
  float* state = nullptr;
  float value = 0;
  float root = 0;
};

__device__ RowStep row_step(const DeviceUpdate& update, std::int64_t row, float mean_square) {
  using Kind = DeviceUpdate::Kind;
  RowStep step;
  if (update.kind == Kind::row_wise_adagrad) {
    step.state = update.state.row_sum + row;
    step.value = *step.state + mean_square;
    step.root = sqrtf(step.value) + update.eps;
  } else if (update.kind == Kind::row_wise_adam) {
    step.state = update.state.row_exp_avg_sq + row;
    step.value = update.beta2 * *step.state + update.rest2 * mean_square;
    step.root = sqrtf(step.value * update.correction2) + update.eps;
  }
  return step;
}

/// The states that an optimizer has for each element of a table; null if it has none.
struct ElementStates {
  float* first = nullptr;
  float* second = nullptr;

  __device__ explicit ElementStates(const DeviceUpdate& update) {
    using Kind = DeviceUpdate::Kind;
    if (update.kind == Kind::adagrad) first = update.state.sum;
    if (update.kind == Kind::adam || update.kind == Kind::row_wise_adam) {
      first = update.state.exp_avg;
    }
    if (update.kind == Kind::adam) second = update.state.exp_avg_sq;
  }
};

/// Returns the new weight of an element, and updates its states.
__device__ float element_step(const DeviceUpdate& update, float before, float g, float row_root,
                              float& first, float& second) {
  using Kind = DeviceUpdate::Kind;
  switch (update.kind) {
    case Kind::none:
      break;
    case Kind::sgd:
      return before - update.lr * g;
    case Kind::adagrad:
      first = fmaf(g, g, first);
      return before - update.lr * g / (sqrtf(first) + update.eps);
    case Kind::row_wise_adagrad:
      return before - update.lr / row_root * g;
    case Kind::adam:
    case Kind::row_wise_adam: {
      first = fmaf(update.beta1, first, update.rest1 * g);
      float root = row_root;
      if (update.kind == Kind::adam) {
        second = fmaf(update.beta2, second, update.rest2 * g * g);
        root = sqrtf(second * update.correction2) + update.eps;
      }
      const float step = first * update.correction1 / root + update.decay_of_step * before;
      return before - update.lr * step;
    }
  }
  return before;
}

template <class T>
__device__ void apply(const DeviceUpdate& update, T* w, const float* g, std::int64_t row,
                      float mean_square) {
  const RowStep of_row = row_step(update, row, mean_square);
  __syncwarp();  // until every lane has read the row's state
  if (of_row.state != nullptr && lane() == 0) *of_row.state = of_row.value;
  const ElementStates states(update);
  const std::int64_t dim = update.view.dim;
  for (std::int64_t k = lane(); k < dim; k += kWarpThreads) {
    const std::int64_t i = row * dim + k;
    float first = states.first == nullptr ? 0 : states.first[i];
    float second = states.second == nullptr ? 0 : states.second[i];
    store(w + k, element_step(update, to_float(w[k]), g[k], of_row.root, first, second));
    if (states.first != nullptr) states.first[i] = first;
    if (states.second != nullptr) states.second[i] = second;
  }
}

/// Updates the touched rows, one row per warp. `updates` has one entry per table. Kind::none: the
/// table is not updated.
__global__ void update_rows(GradientSource source, const DeviceUpdate* updates) {
  float* g = shared_floats() + warp_in_block() * source.max_dim;
  const std::int64_t num_rows = *source.touched.num_rows;
  for (std::int64_t index = first_item(); index < num_rows; index += num_warps()) {
    const TouchedRow row(source.touched, index);
    const DeviceUpdate& update = updates[row.table];
    if (update.kind == DeviceUpdate::Kind::none) continue;
    const std::int64_t dim = update.view.dim;
    sum_row(source, index, row, dim, g);
    with_weights(update.view, [&](auto* weights) {
      auto* w = weights + row.row * dim;
      const float squares = finish_gradient(update, source.gradient.scale, w, g);
      apply(update, w, g, row.row, squares / static_cast<float>(dim));
    });
  }
}

/// Returns four columns of the sum that `sum_row` writes.
__device__ Four sum_four(const GradientSource& source, std::int64_t index, const TouchedRow& row,
                         std::int64_t column) {
  Four sum{};
  if (row.count <= kBlockOccurrences) {
#pragma unroll 4
    for (std::int64_t i = row.begin; i < row.begin + row.count; ++i) {
      const TouchedRows::Occurrence& at = source.touched.occurrences[i];
      const std::int64_t first = at.sample * source.gradient.stride + at.column;
      const Four g = load_four(source.gradient.data + first + column);
      for (int k = 0; k < kColumnsAtOnce; ++k) sum.v[k] = fmaf(at.weight, g.v[k], sum.v[k]);
    }
    return sum;
  }
  const float* blocks =
      source.block_sums +
      static_cast<std::int64_t>(source.touched.first_blocks[index]) * source.max_dim + column;
  const std::int64_t num_blocks = (row.count + kBlockOccurrences - 1) / kBlockOccurrences;
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    const Four g = load_four(blocks + block * source.max_dim);
    for (int k = 0; k < kColumnsAtOnce; ++k) sum.v[k] += g.v[k];
  }
  return sum;
}

/// Updates four columns of a row. `w`: their weights before the update.
__device__ void apply_four(const DeviceUpdate& update, std::int64_t i, Four w, const Four& g,
                           float row_root) {
  const ElementStates states(update);
  Four first{};
  Four second{};
  if (states.first != nullptr) first = load_four(states.first + i);
  if (states.second != nullptr) second = load_four(states.second + i);
  for (int k = 0; k < kColumnsAtOnce; ++k) {
    w.v[k] = element_step(update, w.v[k], g.v[k], row_root, first.v[k], second.v[k]);
  }
  store_weights(update.view, i, w);
  if (states.first != nullptr) store_four(states.first + i, first);
  if (states.second != nullptr) store_four(states.second + i, second);
}

/// Does what `update_rows` does, for tables of at most 128 columns: `num_lanes` lanes of a warp
/// take a row, four columns each, and keep its gradient in registers. Requires: each row of a
/// table, of its state and of its gradient is aligned to four elements.
__global__ void update_rows_in_fours(GradientSource source, const DeviceUpdate* updates,
                                     int num_lanes) {
  const int rows_per_warp = kWarpThreads / num_lanes;
  const std::int64_t column = lane() % num_lanes * kColumnsAtOnce;
  const std::int64_t num_rows = *source.touched.num_rows;
  for (std::int64_t first = first_item() * rows_per_warp; first < num_rows;
       first += num_warps() * rows_per_warp) {
    const std::int64_t index = first + lane() / num_lanes;
    const TouchedRow row(source.touched, index < num_rows ? index : first);
    const DeviceUpdate& update = updates[row.table];
    const bool takes_part =
        index < num_rows && update.kind != DeviceUpdate::Kind::none && column < update.view.dim;
    const std::int64_t i = row.row * update.view.dim + column;
    Four w{};
    Four g{};
    float squares = 0;
    if (takes_part) {
      w = load_weights(update.view, i);  // first, so that it arrives while gradients are summed
      g = sum_four(source, index, row, column);
      for (int k = 0; k < kColumnsAtOnce; ++k) {
        g.v[k] = finish_element(update, source.gradient.scale, w.v[k], g.v[k]);
        squares = fmaf(g.v[k], g.v[k], squares);
      }
    }
    squares = sum_over_lanes(squares, num_lanes);
    RowStep of_row;
    if (takes_part) {
      of_row = row_step(update, row.row, squares / static_cast<float>(update.view.dim));
    }
    __syncwarp();  // until every lane has read the row's state
    if (of_row.state != nullptr && column == 0) *of_row.state = of_row.value;
    if (takes_part) apply_four(update, i, w, g, of_row.root);
  }
}

__global__ void write_gradients(GradientSource source, DeviceUpdate update, int table,
                                float* gradients, float* squares) {
  const std::int64_t dim = update.view.dim;
  const std::int64_t begin = source.touched.table_begins[table];
  const std::int64_t end = source.touched.table_begins[table + 1];
  for (std::int64_t index = begin + first_item(); index < end; index += num_warps()) {
    const TouchedRow row(source.touched, index);
    float* g = gradients + (index - begin) * dim;
    sum_row(source, index, row, dim, g);
    with_weights(update.view, [&](auto* weights) {
      const float sum = finish_gradient(update, source.gradient.scale, weights + row.row * dim, g);
      if (lane() == 0) squares[index - begin] = sum;
    });
  }
}

__global__ void apply_gradients(TouchedRows::View touched, DeviceUpdate update, int table,
                                const float* gradients, const float* squares, float row_width) {
  const std::int64_t dim = update.view.dim;
  const std::int64_t begin = touched.table_begins[table];
  const std::int64_t end = touched.table_begins[table + 1];
  for (std::int64_t index = begin + first_item(); index < end; index += num_warps()) {
    const TouchedRow row(touched, index);
    with_weights(update.view, [&](auto* weights) {
      apply(update, weights + row.row * dim, gradients + (index - begin) * dim, row.row,
            squares[index - begin] / row_width);
    });
  }
}

__global__ void add_gradients(GradientSource source, int table, std::int64_t dim, float* out) {
  float* g = shared_floats() + warp_in_block() * source.max_dim;
  const std::int64_t begin = source.touched.table_begins[table];
  const std::int64_t end = source.touched.table_begins[table + 1];
  for (std::int64_t index = begin + first_item(); index < end; index += num_warps()) {
    const TouchedRow row(source.touched, index);
    sum_row(source, index, row, dim, g);
    float* out_row = out + row.row * dim;
    for (std::int64_t k = lane(); k < dim; k += kWarpThreads) {
      out_row[k] += source.gradient.scale * g[k];
    }
  }
}

/// The launch configuration of a kernel in which each warp keeps a row in shared memory.
struct RowLaunch {
  int num_threads;
  std::size_t shared_nbytes;

  explicit RowLaunch(std::int64_t max_dim) {
    const std::int64_t warp_nbytes =
        std::max<std::int64_t>(max_dim, 1) * static_cast<std::int64_t>(sizeof(float));
    if (warp_nbytes > kSharedNbytes) {
      throw Error::expected(ErrorKind::unsupported, {}, "columns of a table on a GPU",
                            "at most " + std::to_string(kSharedNbytes / 4),
                            std::to_string(max_dim));
    }
    const std::int64_t warps = std::min<std::int64_t>(kBlockWarps, kSharedNbytes / warp_nbytes);
    num_threads = static_cast<int>(warps) * kWarpThreads;
    shared_nbytes = static_cast<std::size_t>(warps * warp_nbytes);
  }
  unsigned num_blocks(std::int64_t num_rows) const {
    return num_blocks_for(num_rows, num_threads / kWarpThreads);
  }
};

/// Computes the sums of the blocks of hot rows ([Note: Order of sums]). `dims`: columns
/// of each table; 0 for a table whose sums are not needed.
class SummedGradients {
 public:
  SummedGradients(const std::vector<std::int64_t>& dims, const TouchedRows& touched,
                  const PooledGradient& gradient, cudaStream_t stream) {
    const TouchedRows::View view = touched.view();
    for (const std::int64_t dim : dims) max_dim_ = std::max(max_dim_, dim);
    // A hot row has two or more blocks, and all but its last block are full. So at least half of
    // all blocks are full.
    const std::int64_t max_blocks = 2 * view.num_ids / kBlockOccurrences;
    block_sums_ = DeviceArray<float>(max_blocks * max_dim_, stream);
    source_ = {.touched = view,
               .gradient = gradient,
               .block_sums = block_sums_.data(),
               .max_dim = max_dim_};
    if (max_blocks == 0) return;
    const DeviceArray<std::int64_t> dims_on_device(std::span<const std::int64_t>(dims), stream);
    launch(sum_blocks, num_blocks_for(max_blocks), kBlockThreads, 0, stream, view, gradient,
           dims_on_device.data(), max_dim_, block_sums_.data());
    check(cudaGetLastError(), "sum hot rows");
  }

  const GradientSource& source() const { return source_; }

 private:
  std::int64_t max_dim_ = 0;
  DeviceArray<float> block_sums_{};
  GradientSource source_{};
};

bool are_aligned_to_four(const TableUpdate& update) {
  const OptimizerState& state = update.state;
  return has_rows_aligned_to_four(update.view) && is_aligned_to_four(state.sum) &&
         is_aligned_to_four(state.exp_avg) && is_aligned_to_four(state.exp_avg_sq);
}

/// Returns whether `update_rows_in_fours` can do these updates.
bool can_update_in_fours(std::span<const TableUpdate> updates, const TouchedRows& touched,
                         const PooledGradient& gradient, std::int64_t max_dim) {
  return max_dim <= kWarpThreads * kColumnsAtOnce && touched.has_features_aligned_to_four() &&
         gradient.stride % kColumnsAtOnce == 0 && is_aligned_to_four(gradient.data) &&
         std::ranges::all_of(updates, are_aligned_to_four);
}

std::vector<std::int64_t> dims_with(int num_tables, int table, std::int64_t dim) {
  std::vector<std::int64_t> dims(static_cast<std::size_t>(num_tables));
  dims[static_cast<std::size_t>(table)] = dim;
  return dims;
}

}  // namespace

void fused_update(std::span<const TableUpdate> updates, const TouchedRows& touched,
                  const PooledGradient& gradient, cudaStream_t stream) {
  std::vector<DeviceUpdate> of_table(static_cast<std::size_t>(touched.num_tables()));
  std::vector<std::int64_t> dims(of_table.size());
  for (const TableUpdate& update : updates) {
    of_table[static_cast<std::size_t>(update.table)] = on_device(update);
    dims[static_cast<std::size_t>(update.table)] = update.view.dim;
  }
  if (updates.empty() || touched.view().num_ids == 0) return;
  const SummedGradients sums(dims, touched, gradient, stream);
  const std::int64_t max_dim = sums.source().max_dim;
  const DeviceArray<DeviceUpdate> updates_on_device(std::span<const DeviceUpdate>(of_table),
                                                    stream);
  if (can_update_in_fours(updates, touched, gradient, max_dim)) {
    const int num_lanes = num_lanes_for(max_dim);
    const std::int64_t num_warps = touched.view().num_ids * num_lanes / kWarpThreads + 1;
    launch(update_rows_in_fours, num_blocks_for(num_warps), kBlockThreads, 0, stream, sums.source(),
           updates_on_device.data(), num_lanes);
    check(cudaGetLastError(), "fused update");
    return;
  }
  const RowLaunch rows(max_dim);
  launch(update_rows, rows.num_blocks(touched.view().num_ids), rows.num_threads, rows.shared_nbytes,
         stream, sums.source(), updates_on_device.data());
  check(cudaGetLastError(), "fused update");
}

void row_gradients(const TableUpdate& update, const TouchedRows& touched,
                   const PooledGradient& gradient, float* gradients, float* squares,
                   cudaStream_t stream) {
  if (touched.view().num_ids == 0) return;
  const SummedGradients sums(dims_with(touched.num_tables(), update.table, update.view.dim),
                             touched, gradient, stream);
  launch(write_gradients, num_blocks_for(touched.view().num_ids), kBlockThreads, 0, stream,
         sums.source(), on_device(update), update.table, gradients, squares);
  check(cudaGetLastError(), "row gradients");
}

void apply_row_gradients(const TableUpdate& update, const TouchedRows& touched,
                         const float* gradients, const float* squares, std::int64_t row_width,
                         cudaStream_t stream) {
  if (touched.view().num_ids == 0) return;
  launch(apply_gradients, num_blocks_for(touched.view().num_ids), kBlockThreads, 0, stream,
         touched.view(), on_device(update), update.table, gradients, squares,
         static_cast<float>(row_width));
  check(cudaGetLastError(), "apply row gradients");
}

void add_dense_gradient(const TouchedRows& touched, int table, std::int64_t dim,
                        const PooledGradient& gradient, float* out, cudaStream_t stream) {
  if (touched.view().num_ids == 0) return;
  const SummedGradients sums(dims_with(touched.num_tables(), table, dim), touched, gradient,
                             stream);
  const RowLaunch rows(dim);
  launch(add_gradients, rows.num_blocks(touched.view().num_ids), rows.num_threads,
         rows.shared_nbytes, stream, sums.source(), table, dim, out);
  check(cudaGetLastError(), "dense gradient");
}

}  // namespace tessera::embedding::cuda
