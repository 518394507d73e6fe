#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <span>
#include <utility>

#include "embedding_kernels/bags.h"
#include "embedding_kernels/cuda/device_memory.h"
#include "embedding_kernels/fused_update.h"

// The kernels of tessera::embedding on a CUDA device: the same functions with a stream in place of
// threads. What the kernels read and write lies on the device: weights and state of tables, ids,
// offsets and weights of bags, gradients and outputs. Spans of views themselves, `table_of_feature`
// and `column_of_feature` lie on the host. Nothing waits for the device but what says so. Sums over
// the columns of a row are not in the order of the processor's, all others are.
// Throws: Error(io) where CUDA fails.
namespace tessera::embedding::cuda {

void pooled_sums(std::span<const TableView> tables, const Bags& bags, float* out,
                 std::int64_t out_stride, cudaStream_t stream);

void sample_weight_gradients(std::span<const TableView> tables, const Bags& bags,
                             const PooledGradient& gradient, float* out, cudaStream_t stream);

/// The rows of all tables that a batch names, by table and then ascending. See
/// [Note: Order of sums]: it holds here too.
class TouchedRows {
 public:
  using Occurrence = embedding::TouchedRows::Occurrence;

  TouchedRows(std::span<const TableView> tables, const Bags& bags, cudaStream_t stream);

  /// What kernels see.
  struct View {
    const std::uint64_t* keys;          // [rows], table << row_bits | row
    const std::uint32_t* offsets;       // [rows], of the first occurrence
    const std::uint32_t* counts;        // [rows], of occurrences
    const std::uint32_t* first_blocks;  // [ids + 1], of hot rows; then the number of all
    const Occurrence* occurrences;      // [ids]
    const std::uint32_t* num_rows;      // one, of all tables
    const std::uint32_t* table_begins;  // [tables + 1], into the rows
    std::int64_t num_ids;
    int row_bits;
  };
  View view() const;
  int num_tables() const { return num_tables_; }

  /// Returns the number of rows that are touched in a table. Waits for the stream.
  std::int64_t num_rows(int table) const;
  /// Copies them into `rows`, on the device. Waits for the stream.
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
  DeviceArray<std::uint64_t> sorted_keys_{};
  DeviceArray<std::uint64_t> keys_{};
  DeviceArray<std::uint32_t> offsets_{};
  DeviceArray<std::uint32_t> counts_{};
  DeviceArray<std::uint32_t> first_blocks_{};
  DeviceArray<Occurrence> occurrences_{};
  DeviceArray<std::uint32_t> num_rows_{};
  DeviceArray<std::uint32_t> table_begins_{};
};

/// Throws: Error(unsupported) where a row is too wide for the memory that threads share (12,288
/// columns).
void fused_update(std::span<const TableUpdate> updates, const TouchedRows& touched,
                  const PooledGradient& gradient, cudaStream_t stream);

void row_gradients(const TableUpdate& update, const TouchedRows& touched,
                   const PooledGradient& gradient, float* gradients, float* squares,
                   cudaStream_t stream);

void apply_row_gradients(const TableUpdate& update, const TouchedRows& touched,
                         const float* gradients, const float* squares, std::int64_t row_width,
                         cudaStream_t stream);

void add_dense_gradient(const TouchedRows& touched, int table, std::int64_t dim,
                        const PooledGradient& gradient, float* out, cudaStream_t stream);

}  // namespace tessera::embedding::cuda
