#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <utility>

#include "embedding_kernels/bags.h"
#include "embedding_kernels/cuda/device_memory.h"
#include "embedding_kernels/fused_update.h"

// The kernels of tessera::embedding on CUDA: the same functions as on the CPU, with a stream
// instead of threads. In device memory: weights and state of tables; ids, offsets and weights of
// bags; gradients and outputs. In host memory: spans of views, `table_of_feature` and
// `column_of_feature`. Functions do not wait for the device unless they say so. The stream belongs
// to the current device. Requires, as on the CPU: each id is a row of its feature's table, and
// offsets ascend from 0 to the number of ids. Nothing checks this: a wrong id makes a kernel read
// and write outside of the table. Sums over a row's columns are in another order than on the CPU;
// all other sums are in the same order. Throws: Error(io) if CUDA fails.
namespace tessera::embedding::cuda {

void pooled_sums(std::span<const TableView> tables, const Bags& bags, float* out,
                 std::int64_t out_stride, cudaStream_t stream);

void sample_weight_gradients(std::span<const TableView> tables, const Bags& bags,
                             const PooledGradient& gradient, float* out, cudaStream_t stream);

/// The rows that a batch looks up, sorted by table, then row. [Note: Order of sums] holds here too.
class TouchedRows {
 public:
  using Occurrence = embedding::TouchedRows::Occurrence;

  /// Throws: Error(unsupported) if a batch has 2^31 ids, or 2^32 samples, or more.
  TouchedRows(std::span<const TableView> tables, const Bags& bags, cudaStream_t stream);

  /// The touched rows of all tables, in device memory. `[rows]`: one item per touched row.
  struct View {
    const std::uint64_t* keys;     // [rows], table << row_bits | row
    const std::uint32_t* offsets;  // [rows], index of the first occurrence
    const std::uint32_t* counts;   // [rows], number of occurrences
    const std::uint32_t*
        first_blocks;  // [ids + 1], by touched row: first block if hot; last: their count
    const Occurrence* occurrences;      // [ids]
    const std::uint32_t* num_rows;      // one number: how many touched rows all tables have
    const std::uint32_t* table_begins;  // [tables + 1], index of each table's first touched row
    std::int64_t num_ids;
    int row_bits;
  };
  View view() const;
  int num_tables() const { return num_tables_; }
  /// Returns whether each feature begins at a multiple of four columns of the pooled output.
  bool has_features_aligned_to_four() const { return has_features_aligned_to_four_; }

  /// Returns the number of touched rows of a table. Waits for the stream.
  std::int64_t num_rows(int table) const;
  /// Waits for the stream, then starts a copy of the table's touched rows to device memory `rows`.
  void copy_rows(int table, std::int64_t* rows) const;

 private:
  void sort(const Bags& bags);
  void group();
  void count_blocks();
  std::pair<std::uint32_t, std::uint32_t> range_of(int table) const;

  cudaStream_t stream_;
  std::int64_t num_ids_;
  int num_tables_;
  int row_bits_ = 0;
  bool has_features_aligned_to_four_ = false;
  DeviceArray<std::uint64_t> sorted_keys_{};
  DeviceArray<std::uint64_t> keys_{};
  DeviceArray<std::uint32_t> offsets_{};
  DeviceArray<std::uint32_t> counts_{};
  DeviceArray<std::uint32_t> first_blocks_{};
  DeviceArray<Occurrence> occurrences_{};
  DeviceArray<std::uint32_t> num_rows_{};
  DeviceArray<std::uint32_t> table_begins_{};
};

/// Does what the CPU's function of this name does. Throws: Error(unsupported) if a row has more
/// than 12,288 columns, because it does not fit into shared memory.
void fused_update(std::span<const TableUpdate> updates, const TouchedRows& touched,
                  const PooledGradient& gradient, cudaStream_t stream);

void row_gradients(const TableUpdate& update, const TouchedRows& touched,
                   const PooledGradient& gradient, float* gradients, float* squares,
                   cudaStream_t stream);

void apply_row_gradients(const TableUpdate& update, const TouchedRows& touched,
                         const float* gradients, const float* squares, std::int64_t row_width,
                         cudaStream_t stream);

/// Does what the CPU's function of this name does. Throws as `fused_update`.
void add_dense_gradient(const TouchedRows& touched, int table, std::int64_t dim,
                        const PooledGradient& gradient, float* out, cudaStream_t stream);

}  // namespace tessera::embedding::cuda
