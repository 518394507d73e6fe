// The kernels on a GPU against those on the processor.
#include "embedding_kernels/cuda/kernels.h"

#include <gmock/gmock.h>

#include <cmath>

#include "embedding_kernels/batches.h"
#include "embedding_kernels/pooled.h"

namespace tessera::embedding::cuda {
namespace {

using test::Batch;
using test::BatchShape;
using test::Random;
using test::Table;

bool has_gpu() {
  int num_devices = 0;
  return cudaGetDeviceCount(&num_devices) == cudaSuccess && num_devices > 0;
}

template <class T>
DeviceArray<T> on_device(const std::vector<T>& values) {
  return DeviceArray<T>(std::span<const T>(values), nullptr);
}

template <class T>
std::vector<T> on_host(const DeviceArray<T>& values) {
  std::vector<T> copied(static_cast<std::size_t>(values.numel()));
  check(cudaMemcpy(copied.data(), values.data(), values.nbytes(), cudaMemcpyDeviceToHost), "copy");
  return copied;
}

void expect_near(const std::vector<float>& found, const std::vector<float>& expected,
                 float tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_NEAR(found[i], expected[i], tolerance * (1 + std::abs(expected[i]))) << "element " << i;
  }
}

/// A batch and its gradient, here and on the device.
class CudaEmbeddingTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_gpu()) GTEST_SKIP() << "no GPU";
  }

  void make(DType dtype) {
    tables_ = {test::random_table(random_, dtype, 5000, 64),
               test::random_table(random_, dtype, 70, 33),
               {dtype, 0, 8, {}}};
    batch_ = test::random_batch(random_, tables_,
                                {.table_of_feature = {1, 0, 2, 1},
                                 .batch = 3000,
                                 .max_bag = 6,
                                 .hot_percent = 30,
                                 .weights = BatchShape::Weights::random});
    gradient_ = test::random_gradient(random_, batch_);
    ids_ = on_device(batch_.ids);
    offsets_ = on_device(batch_.offsets);
    weights_ = on_device(batch_.weights);
    device_gradient_ = on_device(gradient_);
    bytes_.clear();
    for (const Table& table : tables_) bytes_.push_back(on_device(table.bytes));
  }

  Bags device_bags() const {
    Bags bags = batch_.bags();
    const auto numel = static_cast<std::size_t>(ids_.numel());
    bags.ids = {ids_.data(), numel};
    bags.offsets = {offsets_.data(), static_cast<std::size_t>(offsets_.numel())};
    bags.weights = {weights_.data(), numel};
    return bags;
  }
  std::vector<TableView> device_views() const {
    std::vector<TableView> views;
    for (std::size_t i = 0; i < tables_.size(); ++i) {
      views.push_back({.weights = bytes_[i].data(),
                       .dtype = tables_[i].dtype,
                       .rows = tables_[i].rows,
                       .dim = tables_[i].dim});
    }
    return views;
  }
  PooledGradient host_gradient() const {
    return {.data = gradient_.data(), .stride = batch_.num_columns, .scale = 0.5F};
  }
  PooledGradient device_gradient() const {
    return {.data = device_gradient_.data(), .stride = batch_.num_columns, .scale = 0.5F};
  }

  Random random_{};
  std::vector<Table> tables_{};
  Batch batch_{};
  std::vector<float> gradient_{};
  DeviceArray<std::int64_t> ids_{}, offsets_{};
  DeviceArray<float> weights_{}, device_gradient_{};
  std::vector<DeviceArray<std::byte>> bytes_{};
};

// Shows D8.
TEST_F(CudaEmbeddingTest, PooledSumsAreThoseOfTheProcessor) {
  for (const DType dtype : test::kDTypes) {
    make(dtype);
    std::vector<float> expected(gradient_.size(), 7);
    embedding::pooled_sums(test::views_of(tables_), batch_.bags(), expected.data(),
                           batch_.num_columns, 1);
    const auto found = on_device(std::vector<float>(gradient_.size(), 7));
    pooled_sums(device_views(), device_bags(), found.data(), batch_.num_columns, nullptr);
    expect_near(on_host(found), expected, 1e-6F);

    std::vector<float> expected_weights(batch_.ids.size());
    embedding::sample_weight_gradients(test::views_of(tables_), batch_.bags(), host_gradient(),
                                       expected_weights.data(), 1);
    const DeviceArray<float> found_weights(ids_.numel(), nullptr);
    sample_weight_gradients(device_views(), device_bags(), device_gradient(), found_weights.data(),
                            nullptr);
    expect_near(on_host(found_weights), expected_weights, 1e-5F);
  }
}

// Shows D9.
TEST_F(CudaEmbeddingTest, TouchedRowsAndDenseGradientsAreThoseOfTheProcessor) {
  make(DType::float32);
  const auto expected = embedding::touched_rows(test::views_of(tables_), batch_.bags(), 1);
  const TouchedRows found(device_views(), device_bags(), nullptr);
  for (int table = 0; table < 3; ++table) {
    SCOPED_TRACE(table);
    const auto& rows = expected[table].rows;
    ASSERT_EQ(found.num_rows(table), expected[table].num_rows());
    const DeviceArray<std::int64_t> device_rows(found.num_rows(table), nullptr);
    found.copy_rows(table, device_rows.data());
    EXPECT_EQ(on_host(device_rows), std::vector<std::int64_t>(rows.begin(), rows.end()));

    const Table& of = tables_[static_cast<std::size_t>(table)];
    std::vector<float> expected_dense(static_cast<std::size_t>(of.rows * of.dim), 2);
    const auto dense = on_device(expected_dense);
    embedding::add_dense_gradient(expected, table, of.dim, host_gradient(), expected_dense.data(),
                                  1);
    add_dense_gradient(found, table, of.dim, device_gradient(), dense.data(), nullptr);
    expect_near(on_host(dense), expected_dense, 1e-6F);
  }
}

/// One table's state of every kind, as zeros.
template <class Array>
struct State {
  Array sum, exp_avg, exp_avg_sq, row_sum, row_exp_avg_sq;

  OptimizerState view() {
    return {.sum = sum.data(),
            .row_sum = row_sum.data(),
            .exp_avg = exp_avg.data(),
            .exp_avg_sq = exp_avg_sq.data(),
            .row_exp_avg_sq = row_exp_avg_sq.data(),
            .step = 3};
  }
};

State<std::vector<float>> zeros_for(const Table& table) {
  const std::vector<float> pointwise(static_cast<std::size_t>(table.rows * table.dim));
  const std::vector<float> row_wise(static_cast<std::size_t>(table.rows));
  return {pointwise, pointwise, pointwise, row_wise, row_wise};
}

State<DeviceArray<float>> copied(const State<std::vector<float>>& state) {
  return {on_device(state.sum), on_device(state.exp_avg), on_device(state.exp_avg_sq),
          on_device(state.row_sum), on_device(state.row_exp_avg_sq)};
}

void expect_near(const State<DeviceArray<float>>& found,
                 const State<std::vector<float>>& expected) {
  expect_near(on_host(found.sum), expected.sum, 1e-5F);
  expect_near(on_host(found.exp_avg), expected.exp_avg, 1e-5F);
  expect_near(on_host(found.exp_avg_sq), expected.exp_avg_sq, 1e-5F);
  expect_near(on_host(found.row_sum), expected.row_sum, 1e-5F);
  expect_near(on_host(found.row_exp_avg_sq), expected.row_exp_avg_sq, 1e-5F);
}

enum class Phases { one, two };

class CudaUpdateTest : public CudaEmbeddingTest {
 protected:
  void update_here(const FusedOptimizer& optimizer, int table, State<std::vector<float>>& state) {
    const TableUpdate update{.table = table,
                             .view = tables_[static_cast<std::size_t>(table)].view(),
                             .optimizer = optimizer,
                             .state = state.view()};
    const auto touched = embedding::touched_rows(test::views_of(tables_), batch_.bags(), 1);
    embedding::fused_update({&update, 1}, touched, host_gradient(), 1);
  }

  void update_there(const FusedOptimizer& optimizer, int table, State<DeviceArray<float>>& state,
                    Phases phases) {
    const TableView view = device_views()[static_cast<std::size_t>(table)];
    const TableUpdate update{
        .table = table, .view = view, .optimizer = optimizer, .state = state.view()};
    const TouchedRows touched(device_views(), device_bags(), nullptr);
    if (phases == Phases::one) {
      fused_update({&update, 1}, touched, device_gradient(), nullptr);
    } else {
      const DeviceArray<float> gradients(touched.num_rows(table) * view.dim, nullptr);
      const DeviceArray<float> squares(touched.num_rows(table), nullptr);
      row_gradients(update, touched, device_gradient(), gradients.data(), squares.data(), nullptr);
      apply_row_gradients(update, touched, gradients.data(), squares.data(), view.dim, nullptr);
    }
  }

  void compare(const FusedOptimizer& optimizer, DType dtype, Phases phases) {
    make(dtype);
    for (int number = 0; number < 2; ++number) {
      const auto table = static_cast<std::size_t>(number);
      State<std::vector<float>> here = zeros_for(tables_[table]);
      State<DeviceArray<float>> there = copied(here);
      update_here(optimizer, number, here);
      update_there(optimizer, number, there, phases);
      expect_near(there, here);
      const std::vector<double> expected = tables_[table].values();
      const std::vector<double> found = test::read(dtype, on_host(bytes_[table]));
      ASSERT_EQ(found.size(), expected.size());
      const double tolerance = 4 * test::precision(dtype) + 2e-6;
      for (std::size_t i = 0; i < found.size(); ++i) {
        ASSERT_NEAR(found[i], expected[i], tolerance * (1 + std::abs(expected[i]))) << i;
      }
    }
  }
};

// Shows D9.
TEST_F(CudaUpdateTest, UpdatesAreThoseOfTheProcessor) {
  const std::vector<FusedOptimizer> optimizers{
      Sgd{.weight_decay = 0.01, .max_gradient = 0.5},
      Adagrad{.weight_decay = 0.01, .max_gradient = 0.5},
      RowWiseAdagrad{.weight_decay = 0.01, .max_gradient = 0.5},
      Adam{.weight_decay = 0.01, .max_gradient = 0.5},
      RowWiseAdam{.weight_decay = 0.01, .max_gradient = 0.5}};
  for (const FusedOptimizer& optimizer : optimizers) {
    for (const DType dtype : test::kDTypes) {
      for (const Phases phases : {Phases::one, Phases::two}) {
        SCOPED_TRACE(std::to_string(optimizer.index()) + " " + std::string(dtype_name(dtype)));
        compare(optimizer, dtype, phases);
      }
    }
  }
}

// Shows D7.
TEST_F(CudaEmbeddingTest, NothingTouchedIsNoUpdate) {
  const Batch none;
  std::vector<TableView> tables{{nullptr, DType::float32, 0, 4}};
  const TouchedRows touched(tables, none.bags(), nullptr);
  EXPECT_EQ(touched.num_rows(0), 0);
  const TableUpdate update{.table = 0, .view = tables[0], .optimizer = Sgd{}, .state = {}};
  fused_update({&update, 1}, touched, {.data = nullptr, .stride = 0}, nullptr);
  pooled_sums(tables, none.bags(), nullptr, 0, nullptr);
  check(cudaDeviceSynchronize(), "wait");
}

}  // namespace
}  // namespace tessera::embedding::cuda
