#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "embedding_kernels/bags.h"
#include "support/random.h"

namespace tessera::embedding::test {

using tessera::test::Random;

inline constexpr DType kDTypes[] = {DType::float32, DType::float16, DType::bfloat16};
inline constexpr std::int64_t kDims[] = {1, 3, 7, 16, 64, 100, 256, 300};

/// Converts through the core's casts: the nearest elements, ties to even.
std::vector<std::byte> stored(DType dtype, std::span<const double> values);
std::vector<double> read(DType dtype, std::span<const std::byte> bytes);

/// A table with its own memory.
struct Table {
  DType dtype;
  std::int64_t rows;
  std::int64_t dim;
  std::vector<std::byte> bytes;

  TableView view() { return {.weights = bytes.data(), .dtype = dtype, .rows = rows, .dim = dim}; }
  std::vector<double> values() const { return read(dtype, bytes); }
};

/// Returns a table of numbers from -2 to 2 that its dtype holds.
Table random_table(Random& random, DType dtype, std::int64_t rows, std::int64_t dim);

std::vector<TableView> views_of(std::vector<Table>& tables);

/// A batch with its own memory.
struct Batch {
  std::vector<int> table_of_feature{};
  std::vector<std::int64_t> column_of_feature{};
  std::int64_t batch = 0;
  std::vector<std::int64_t> ids{};
  std::vector<std::int64_t> offsets{0};
  std::vector<float> weights{};
  std::int64_t num_columns = 0;

  Bags bags() const;
  /// Calls `body(feature, sample, place)` for every id, in the order of the batch.
  void for_places(const std::function<void(std::size_t, std::int64_t, std::size_t)>& body) const;
  float weight(std::size_t place) const { return weights.empty() ? 1.0F : weights[place]; }
};

struct BatchShape {
  std::vector<int> table_of_feature;
  std::int64_t batch;
  std::int64_t max_bag = 5;      // ids
  std::int64_t hot_percent = 0;  // of the ids, are row 0
  enum class Weights { none, random } weights = Weights::none;
  std::int64_t gap = 1;  // columns of no feature before each feature
};

/// Returns random bags, some of them empty.
Batch random_batch(Random& random, const std::vector<Table>& tables, const BatchShape& shape);

/// Returns the gradient of a pooled output: multiples of 1/8, so that few sums are rounded.
std::vector<float> random_gradient(Random& random, const Batch& batch);

/// Returns the sums of bags, `[batch, num_columns]`. Columns of no feature are `untouched`.
std::vector<double> pooled_in_float64(const std::vector<Table>& tables, const Batch& batch,
                                      double untouched);

/// Returns the gradient of each place's weight.
std::vector<double> weight_gradients_in_float64(const std::vector<Table>& tables,
                                                const Batch& batch,
                                                const std::vector<float>& gradient);

/// Runs `body` once with each instruction set that this processor has and the kernels know.
void with_every_instruction_set(const std::function<void()>& body);

/// Says how `dtype` differs from float64, relative to a number.
double precision(DType dtype);

}  // namespace tessera::embedding::test
