// Compares the CUDA kernels with the CPU's kernels, and with results in float64. Runs on a GPU, and
// with smaller batches on the CPU (tests/cuda_on_cpu).
#include "embedding_kernels/cuda/kernels.h"

#include <gmock/gmock.h>

#include <cmath>

#include "embedding_kernels/batches.h"
#include "embedding_kernels/pooled.h"
#include "embedding_kernels/reference_optimizer.h"
#include "support/error_matchers.h"

namespace tessera::embedding::cuda {
namespace {

using tessera::test::ThrowsError;
using test::Batch;
using test::BatchShape;
using test::Random;
using test::ReferenceOptimizer;
using test::Table;

#ifdef TESSERA_CUDA_ON_CPU
constexpr std::int64_t kBatch = 25;
constexpr std::int64_t kManyRows = 200;
#else
constexpr std::int64_t kBatch = 3000;
constexpr std::int64_t kManyRows = 5000;
#endif
constexpr float kUntouched = 7;

bool has_gpu() {
  int num_devices = 0;
  return cudaGetDeviceCount(&num_devices) == cudaSuccess && num_devices > 0;
}

/// A stream that waits for no other stream. So a test fails if the kernels use another stream.
class Stream {
 public:
  Stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

template <class T>
DeviceArray<T> on_device(const std::vector<T>& values, const Stream& stream) {
  return DeviceArray<T>(std::span<const T>(values), stream.get());
}

template <class T>
std::vector<T> on_host(const DeviceArray<T>& values, const Stream& stream) {
  std::vector<T> copied(static_cast<std::size_t>(values.numel()));
  check(cudaMemcpyAsync(copied.data(), values.data(), values.nbytes(), cudaMemcpyDeviceToHost,
                        stream.get()),
        "copy");
  check(cudaStreamSynchronize(stream.get()), "wait");
  return copied;
}

template <class Found, class Expected>
void expect_near(const std::vector<Found>& found, const std::vector<Expected>& expected,
                 double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    const auto number = static_cast<double>(expected[i]);
    ASSERT_NEAR(static_cast<double>(found[i]), number, tolerance * (1 + std::abs(number)))
        << "element " << i;
  }
}

/// Sets the weight of each id to 1 / (ids in its bag), so that the sum of a bag is its mean.
void weigh_for_means(Batch& batch) {
  batch.weights.resize(batch.ids.size());
  for (std::size_t bag = 0; bag + 1 < batch.offsets.size(); ++bag) {
    const std::int64_t numel = batch.offsets[bag + 1] - batch.offsets[bag];
    std::fill_n(batch.weights.begin() + batch.offsets[bag], numel, 1 / static_cast<float>(numel));
  }
}

/// Widths of tables. Kernels read four columns at once if all widths are multiples of four.
enum class Widths { any, in_fours };

/// A batch and its gradient, on the host and on the device.
class CudaEmbeddingTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!has_gpu()) GTEST_SKIP() << "no GPU";
    stream_.emplace();
  }

  /// Makes tables of one dtype and different widths; the third has no rows, the last has one.
  void make_tables(DType dtype, Widths widths = Widths::any) {
    widths_ = widths;
    const bool in_fours = widths == Widths::in_fours;
    tables_ = {test::random_table(random_, dtype, kManyRows, 64),
               test::random_table(random_, dtype, 20, in_fours ? 36 : 33),
               {dtype, 0, 8, {}},
               test::random_table(random_, dtype, 5, in_fours ? 4 : 1),
               test::random_table(random_, dtype, 1, in_fours ? 128 : 131)};
    copy_tables();
  }
  void copy_tables() {
    bytes_.clear();
    for (const Table& table : tables_) bytes_.push_back(on_device(table.bytes, *stream_));
  }

  void make_batch(const BatchShape& shape) {
    set_batch(test::random_batch(random_, tables_, shape));
  }
  void make_batch() {
    make_batch({.table_of_feature = {1, 0, 2, 1, 3, 4},
                .batch = kBatch,
                .max_bag = 6,
                .hot_percent = 30,
                .weights = BatchShape::Weights::random,
                .gap = widths_ == Widths::in_fours ? 4 : 1});
  }
  void set_batch(Batch batch) {
    batch_ = std::move(batch);
    gradient_ = test::random_gradient(random_, batch_);
    ids_ = on_device(batch_.ids, *stream_);
    offsets_ = on_device(batch_.offsets, *stream_);
    weights_ = on_device(batch_.weights, *stream_);
    device_gradient_ = on_device(gradient_, *stream_);
  }

  Bags device_bags() const {
    Bags bags = batch_.bags();
    bags.ids = {ids_.data(), static_cast<std::size_t>(ids_.numel())};
    bags.offsets = {offsets_.data(), static_cast<std::size_t>(offsets_.numel())};
    bags.weights = {weights_.data(), static_cast<std::size_t>(weights_.numel())};
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

  std::vector<float> pooled_there() const {
    const auto out = on_device(std::vector<float>(gradient_.size(), kUntouched), *stream_);
    pooled_sums(device_views(), device_bags(), out.data(), batch_.num_columns, stream_->get());
    return on_host(out, *stream_);
  }
  std::vector<float> weight_gradients_there() const {
    const DeviceArray<float> out(ids_.numel(), stream_->get());
    sample_weight_gradients(device_views(), device_bags(), device_gradient(), out.data(),
                            stream_->get());
    return on_host(out, *stream_);
  }

  void expect_lookups_as_here() {
    std::vector<float> sums(gradient_.size(), kUntouched);
    embedding::pooled_sums(test::views_of(tables_), batch_.bags(), sums.data(), batch_.num_columns,
                           1);
    const std::vector<float> found = pooled_there();
    expect_near(found, sums, 1e-6);
    expect_near(found, test::pooled_in_float64(tables_, batch_, kUntouched), 1e-5);

    std::vector<float> gradients(batch_.ids.size());
    embedding::sample_weight_gradients(test::views_of(tables_), batch_.bags(), host_gradient(),
                                       gradients.data(), 1);
    const std::vector<float> found_gradients = weight_gradients_there();
    expect_near(found_gradients, gradients, 1e-5);
    expect_near(found_gradients, test::weight_gradients_in_float64(tables_, batch_, gradient_),
                1e-5);
  }

  void expect_touched_rows_as_here(int table, const embedding::TouchedRows& expected,
                                   const TouchedRows& found) {
    SCOPED_TRACE(table);
    const auto rows = expected[table].rows;
    ASSERT_EQ(found.num_rows(table), expected[table].num_rows());
    const DeviceArray<std::int64_t> device_rows(found.num_rows(table), stream_->get());
    found.copy_rows(table, device_rows.data());
    EXPECT_EQ(on_host(device_rows, *stream_), std::vector<std::int64_t>(rows.begin(), rows.end()));

    const Table& of = tables_[static_cast<std::size_t>(table)];
    std::vector<float> dense(static_cast<std::size_t>(of.rows * of.dim), 2);
    const auto device_dense = on_device(dense, *stream_);
    std::vector<double> exact(dense.begin(), dense.end());
    embedding::add_dense_gradient(expected, table, of.dim, host_gradient(), dense.data(), 1);
    add_dense_gradient(found, table, of.dim, device_gradient(), device_dense.data(),
                       stream_->get());
    for (const auto& [row, sum] : test::summed_gradients(batch_, table, of.dim, gradient_, 0.5)) {
      for (std::size_t k = 0; k < sum.size(); ++k) {
        exact[static_cast<std::size_t>(row * of.dim) + k] += sum[k];
      }
    }
    const std::vector<float> found_dense = on_host(device_dense, *stream_);
    expect_near(found_dense, dense, 1e-6);
    expect_near(found_dense, exact, 1e-5);
  }
  void expect_touched_rows_as_here() {
    const auto expected = embedding::touched_rows(test::views_of(tables_), batch_.bags(), 1);
    const TouchedRows found(device_views(), device_bags(), stream_->get());
    for (int table = 0; table < static_cast<int>(tables_.size()); ++table) {
      expect_touched_rows_as_here(table, expected, found);
    }
  }

  std::optional<Stream> stream_{};  // the last to be destroyed
  Random random_{};
  Widths widths_ = Widths::any;
  std::vector<Table> tables_{};
  Batch batch_{};
  std::vector<float> gradient_{};
  DeviceArray<std::int64_t> ids_{}, offsets_{};
  DeviceArray<float> weights_{}, device_gradient_{};
  std::vector<DeviceArray<std::byte>> bytes_{};
};

// Shows D8.
TEST_F(CudaEmbeddingTest, LookupsAreThoseOfTheProcessor) {
  for (const Widths widths : {Widths::any, Widths::in_fours}) {
    SCOPED_TRACE(widths == Widths::any ? "any width" : "widths in fours");
    for (const DType dtype : test::kDTypes) {
      SCOPED_TRACE(dtype_name(dtype));
      make_tables(dtype, widths);
      make_batch();
      expect_lookups_as_here();
      batch_.weights.clear();
      set_batch(batch_);
      expect_lookups_as_here();
      weigh_for_means(batch_);
      set_batch(batch_);
      expect_lookups_as_here();
    }
  }
}

// Shows D9.
TEST_F(CudaEmbeddingTest, TouchedRowsAndDenseGradientsAreThoseOfTheProcessor) {
  make_tables(DType::float32);
  make_batch();
  expect_touched_rows_as_here();
}

// Shows D9.
TEST_F(CudaEmbeddingTest, HotRowsAreSummedInBlocks) {
  tables_ = {test::random_table(random_, DType::float32, 1, 5),
             test::random_table(random_, DType::float32, 3, 3)};
  copy_tables();
  make_batch({.table_of_feature = {1, 0, 1}, .batch = 600, .max_bag = 5, .hot_percent = 80});
  ASSERT_GT(batch_.ids.size(), 3U * embedding::TouchedRows::kBlockOccurrences);
  expect_touched_rows_as_here();
}

// Shows D9.
TEST_F(CudaEmbeddingTest, HotRowsAreUpdatedInFours) {
  tables_ = {test::random_table(random_, DType::float32, 1, 8),
             test::random_table(random_, DType::float32, 3, 4)};
  copy_tables();
  make_batch({.table_of_feature = {1, 0, 1}, .batch = 600, .hot_percent = 80, .gap = 4});
  ASSERT_GT(batch_.ids.size(), 3U * embedding::TouchedRows::kBlockOccurrences);
  const Sgd optimizer{.lr = 0.01};
  std::vector<TableUpdate> here;
  std::vector<TableUpdate> there;
  for (int table = 0; table < 2; ++table) {
    const auto number = static_cast<std::size_t>(table);
    here.push_back({table, tables_[number].view(), optimizer, {}});
    there.push_back({table, device_views()[number], optimizer, {}});
  }
  const auto touched = embedding::touched_rows(test::views_of(tables_), batch_.bags(), 1);
  const TouchedRows touched_there(device_views(), device_bags(), stream_->get());
  embedding::fused_update(here, touched, host_gradient(), 1);
  fused_update(there, touched_there, device_gradient(), stream_->get());
  for (std::size_t table = 0; table < 2; ++table) {
    expect_near(test::read(DType::float32, on_host(bytes_[table], *stream_)),
                tables_[table].values(), 1e-6);
  }
}

/// The keys (table, row) have 0 bits to sort by. Shows D9.
TEST_F(CudaEmbeddingTest, TheOnlyRowOfTheOnlyTableIsTouched) {
  tables_ = {test::random_table(random_, DType::float16, 1, 40)};
  copy_tables();
  make_batch({.table_of_feature = {0, 0}, .batch = 3});
  expect_touched_rows_as_here();
  expect_lookups_as_here();
}

/// Shared memory of a block has room for some rows, then for one, then for none. Shows D9.
TEST_F(CudaEmbeddingTest, RowsFitIntoSharedMemoryOrAreRefused) {
  for (const std::int64_t dim : {2000, 12'288}) {
    SCOPED_TRACE(dim);
    tables_ = {test::random_table(random_, DType::bfloat16, 9, dim)};
    copy_tables();
    make_batch({.table_of_feature = {0}, .batch = 6});
    expect_touched_rows_as_here();
  }
  tables_ = {test::random_table(random_, DType::float32, 2, 12'289)};
  copy_tables();
  make_batch({.table_of_feature = {0}, .batch = 6});
  const TouchedRows touched(device_views(), device_bags(), stream_->get());
  EXPECT_THAT([&] { add_dense_gradient(touched, 0, 12'289, device_gradient(), nullptr, nullptr); },
              ThrowsError(ErrorKind::unsupported,
                          "columns of a table on a GPU: expected at most 12288, found 12289"));
}

/// The kernels count ids in an int, samples in a uint32. Shows D9.
TEST_F(CudaEmbeddingTest, BatchesThatAreTooLargeAreRefused) {
  std::int64_t id = 0;
  Bags bags{};
  bags.ids = {&id, std::size_t{1} << 31};
  EXPECT_THAT(
      [&] { TouchedRows({}, bags, stream_->get()); },
      ThrowsError(ErrorKind::unsupported,
                  "ids of a batch on a GPU: expected at most 2147483647, found 2147483648"));
  bags.ids = {};
  bags.batch = std::int64_t{1} << 32;
  EXPECT_THAT([&] { TouchedRows({}, bags, stream_->get()); },
              ThrowsError(ErrorKind::unsupported,
                          "samples of a batch: expected at most 4294967295, found 4294967296"));
}

/// The state tensors of all optimizers, for one table.
template <class Array>
struct State {
  Array sum, exp_avg, exp_avg_sq, row_sum, row_exp_avg_sq;

  OptimizerState view(std::int64_t step) {
    return {.sum = sum.data(),
            .row_sum = row_sum.data(),
            .exp_avg = exp_avg.data(),
            .exp_avg_sq = exp_avg_sq.data(),
            .row_exp_avg_sq = row_exp_avg_sq.data(),
            .step = step};
  }
};

State<std::vector<float>> zeros_for(const Table& table) {
  const std::vector<float> pointwise(static_cast<std::size_t>(table.rows * table.dim));
  const std::vector<float> row_wise(static_cast<std::size_t>(table.rows));
  return {pointwise, pointwise, pointwise, row_wise, row_wise};
}

State<DeviceArray<float>> copied(const State<std::vector<float>>& state, const Stream& stream) {
  return {on_device(state.sum, stream), on_device(state.exp_avg, stream),
          on_device(state.exp_avg_sq, stream), on_device(state.row_sum, stream),
          on_device(state.row_exp_avg_sq, stream)};
}

State<std::vector<float>> copied(const State<DeviceArray<float>>& state, const Stream& stream) {
  return {on_host(state.sum, stream), on_host(state.exp_avg, stream),
          on_host(state.exp_avg_sq, stream), on_host(state.row_sum, stream),
          on_host(state.row_exp_avg_sq, stream)};
}

void expect_near(const State<std::vector<float>>& found, const State<std::vector<float>>& expected,
                 double tolerance) {
  expect_near(found.sum, expected.sum, tolerance);
  expect_near(found.exp_avg, expected.exp_avg, tolerance);
  expect_near(found.exp_avg_sq, expected.exp_avg_sq, tolerance);
  expect_near(found.row_sum, expected.row_sum, tolerance);
  expect_near(found.row_exp_avg_sq, expected.row_exp_avg_sq, tolerance);
}

void expect_near(const State<std::vector<float>>& found, const ReferenceOptimizer& expected,
                 double tolerance) {
  expect_near(found.sum, expected.sum(), tolerance);
  expect_near(found.exp_avg, expected.exp_avg(), tolerance);
  expect_near(found.exp_avg_sq, expected.exp_avg_sq(), tolerance);
  expect_near(found.row_sum, expected.row_sum(), tolerance);
  expect_near(found.row_exp_avg_sq, expected.row_exp_avg_sq(), tolerance);
}

// Shows D7.
TEST_F(CudaEmbeddingTest, NothingTouchedIsNoUpdate) {
  make_tables(DType::bfloat16);
  const std::vector<std::byte> before = tables_[0].bytes;
  const Batch no_features;
  Batch no_samples;
  no_samples.table_of_feature = {0, 2};
  no_samples.column_of_feature = {0, 64};
  no_samples.num_columns = 72;
  Batch empty_bags = no_samples;
  empty_bags.batch = 2;
  empty_bags.offsets = {0, 0, 0, 0, 0};
  for (const Batch& batch : {no_features, no_samples, empty_bags}) {
    set_batch(batch);
    expect_lookups_as_here();
    const TouchedRows touched(device_views(), device_bags(), stream_->get());
    for (int table = 0; table < 5; ++table) EXPECT_EQ(touched.num_rows(table), 0);
    const TableUpdate update{
        .table = 0, .view = device_views()[0], .optimizer = Sgd{.weight_decay = 1}, .state = {}};
    fused_update({&update, 1}, touched, device_gradient(), stream_->get());
    row_gradients(update, touched, device_gradient(), nullptr, nullptr, stream_->get());
    apply_row_gradients(update, touched, nullptr, nullptr, 64, stream_->get());
    add_dense_gradient(touched, 0, 64, device_gradient(), nullptr, stream_->get());
    EXPECT_EQ(on_host(bytes_[0], *stream_), before);
  }
}

#if defined(TESSERA_CUDA_ON_CPU) && defined(__SANITIZE_ADDRESS__)
/// Kernels do not check ids. AddressSanitizer reports the read outside of the table.
TEST_F(CudaEmbeddingTest, AnIdOutOfRangeReadsBehindTheTable) {
  tables_ = {test::random_table(random_, DType::float32, 3, 2)};
  copy_tables();
  make_batch({.table_of_feature = {0}, .batch = 4});
  batch_.ids.assign(batch_.ids.size() + 1, 3);
  batch_.offsets.back() = static_cast<std::int64_t>(batch_.ids.size());
  set_batch(batch_);
  EXPECT_DEATH(pooled_there(), "heap-buffer-overflow.*pool_bags");
}
#endif

enum class Phases { one, two };

/// Compares optimizer steps of the CUDA kernels with those of the CPU's kernels and of float64.
class CudaUpdateTest : public CudaEmbeddingTest,
                       public testing::WithParamInterface<std::tuple<FusedOptimizer, DType>> {
 protected:
  static constexpr int kTables[] = {0, 1, 3, 4};

  TableUpdate update_of(int table, const TableView& view, const OptimizerState& state) {
    return {.table = table, .view = view, .optimizer = std::get<0>(GetParam()), .state = state};
  }

  /// Updates all tables by one `fused_update` on the device, or each in two phases.
  void update_there(std::vector<State<DeviceArray<float>>>& states, int step, Phases phases) {
    const std::vector<TableView> views = device_views();
    std::vector<TableUpdate> updates;
    for (const int table : kTables) {
      const auto number = static_cast<std::size_t>(table);
      updates.push_back(update_of(table, views[number], states[number].view(step)));
    }
    const TouchedRows touched(views, device_bags(), stream_->get());
    if (phases == Phases::one) {
      fused_update(updates, touched, device_gradient(), stream_->get());
      return;
    }
    for (const TableUpdate& update : updates) {
      const std::int64_t dim = update.view.dim;
      const DeviceArray<float> gradients(touched.num_rows(update.table) * dim, stream_->get());
      const DeviceArray<float> squares(touched.num_rows(update.table), stream_->get());
      row_gradients(update, touched, device_gradient(), gradients.data(), squares.data(),
                    stream_->get());
      apply_row_gradients(update, touched, gradients.data(), squares.data(), dim, stream_->get());
    }
  }

  void update_here(std::vector<State<std::vector<float>>>& states, int step) {
    const auto touched = embedding::touched_rows(test::views_of(tables_), batch_.bags(), 1);
    for (const int table : kTables) {
      const auto number = static_cast<std::size_t>(table);
      const TableUpdate update =
          update_of(table, tables_[number].view(), states[number].view(step));
      embedding::fused_update({&update, 1}, touched, host_gradient(), 1);
    }
  }

  void compare(Phases phases, Widths widths = Widths::any) {
    const auto& [optimizer, dtype] = GetParam();
    make_tables(dtype, widths);
    std::vector<State<std::vector<float>>> here;
    std::vector<State<DeviceArray<float>>> there;
    std::vector<ReferenceOptimizer> exact;
    for (const Table& table : tables_) {
      here.push_back(zeros_for(table));
      there.push_back(copied(here.back(), *stream_));
      exact.emplace_back(table, optimizer);
    }
    for (int step = 1; step <= 2; ++step) {
      make_batch();
      update_here(here, step);
      update_there(there, step, phases);
      for (const int table : kTables) {
        const auto number = static_cast<std::size_t>(table);
        exact[number].step(
            test::summed_gradients(batch_, table, tables_[number].dim, gradient_, 0.5));
      }
    }
    // Tolerances. In each step one side may round a weight up, the other down. Errors of float32
    // add up. Weight decay adds the error of a float16 or bfloat16 weight to the state.
    const double weights = 4 * test::precision(dtype) + 4e-6;
    const double state = 2e-5 + (dtype == DType::float32 ? 0 : test::precision(dtype));
    for (const int table : kTables) {
      SCOPED_TRACE(table);
      const auto number = static_cast<std::size_t>(table);
      const std::vector<double> found = test::read(dtype, on_host(bytes_[number], *stream_));
      expect_near(found, tables_[number].values(), weights);
      expect_near(found, exact[number].weights(), weights);
      const State<std::vector<float>> found_state = copied(there[number], *stream_);
      expect_near(found_state, here[number], state);
      expect_near(found_state, exact[number], state);
    }
  }
};

// Shows D9.
TEST_P(CudaUpdateTest, StepsAreThoseOfTheProcessor) {
  compare(Phases::one);
}

TEST_P(CudaUpdateTest, StepsInFoursAreThoseOfTheProcessor) {
  compare(Phases::one, Widths::in_fours);
}

// Shows D9.
TEST_P(CudaUpdateTest, StepsInTwoPhasesAreThoseOfTheProcessor) {
  compare(Phases::two);
}

constexpr const char* kOptimizerNames[] = {"sgd", "adagrad", "row_wise_adagrad", "adam",
                                           "row_wise_adam"};

/// Adagrad's first step is g / (|g| + eps). If gradient and weight decay cancel, g is a rounding
/// error, and with a smaller eps this error would decide the step.
INSTANTIATE_TEST_SUITE_P(
    All, CudaUpdateTest,
    testing::Combine(
        testing::Values(FusedOptimizer{Sgd{.lr = 0.1, .weight_decay = 0.01, .max_gradient = 0.5}},
                        FusedOptimizer{Adagrad{
                            .lr = 0.1, .eps = 1e-3, .weight_decay = 0.01, .max_gradient = 0.5}},
                        FusedOptimizer{RowWiseAdagrad{
                            .lr = 0.1, .eps = 1e-3, .weight_decay = 0.01, .max_gradient = 0.5}},
                        FusedOptimizer{Adam{.lr = 0.01, .weight_decay = 0.01, .max_gradient = 0.5}},
                        FusedOptimizer{
                            RowWiseAdam{.lr = 0.01, .weight_decay = 0.01, .max_gradient = 0.5}}),
        testing::ValuesIn(test::kDTypes)),
    [](const auto& each) {
      return std::string(kOptimizerNames[std::get<0>(each.param).index()]) + "_" +
             std::string(dtype_name(std::get<1>(each.param)));
    });

}  // namespace
}  // namespace tessera::embedding::cuda
