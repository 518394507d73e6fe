#include "embedding_kernels/pooled.h"

#include <gmock/gmock.h>

#include <cmath>
#include <limits>

#include "embedding_kernels/batches.h"

namespace tessera::embedding {
namespace {

using test::Batch;
using test::BatchShape;
using test::Random;
using test::Table;

constexpr float kUntouched = 12345;

std::vector<float> pooled(std::vector<Table>& tables, const Batch& batch, int num_threads = 1) {
  std::vector<float> out(static_cast<std::size_t>(batch.batch * batch.num_columns), kUntouched);
  pooled_sums(test::views_of(tables), batch.bags(), out.data(), batch.num_columns, num_threads);
  return out;
}

void expect_near(const std::vector<float>& found, const std::vector<double>& expected) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_NEAR(found[i], expected[i], 1e-5 * (1 + std::abs(expected[i]))) << "element " << i;
  }
}

// Shows D8.
TEST(PooledTest, SumsEqualThoseInFloat64) {
  test::with_every_instruction_set([] {
    Random random;
    for (const DType dtype : test::kDTypes) {
      for (const std::int64_t dim : test::kDims) {
        SCOPED_TRACE(std::string(dtype_name(dtype)) + ", dim " + std::to_string(dim));
        std::vector<Table> tables{test::random_table(random, dtype, 50, dim),
                                  test::random_table(random, dtype, 3, 2 * dim)};
        for (const auto weights : {BatchShape::Weights::none, BatchShape::Weights::random}) {
          const Batch batch = test::random_batch(
              random, tables,
              {.table_of_feature = {0, 1, 0}, .batch = 9, .max_bag = 12, .weights = weights});
          expect_near(pooled(tables, batch), test::pooled_in_float64(tables, batch, kUntouched));
        }
      }
    }
  });
}

// Shows D8.
TEST(PooledTest, EveryCodeOfSmallFloatsIsReadExactly) {
  test::with_every_instruction_set([] {
    for (const DType dtype : {DType::float16, DType::bfloat16}) {
      SCOPED_TRACE(dtype_name(dtype));
      constexpr std::size_t kNumCodes = 1 << 16;
      Table table{.dtype = dtype, .rows = 1, .dim = kNumCodes, .bytes = {}};
      for (std::size_t code = 0; code < kNumCodes; ++code) {
        table.bytes.push_back(static_cast<std::byte>(code & 0xFF));
        table.bytes.push_back(static_cast<std::byte>(code >> 8));
      }
      std::vector<Table> tables{table};
      Batch batch;
      batch.table_of_feature = {0};
      batch.column_of_feature = {0};
      batch.batch = 1;
      batch.ids = {0};
      batch.offsets = {0, 1};
      batch.num_columns = kNumCodes;
      const std::vector<double> expected = table.values();
      const std::vector<float> found = pooled(tables, batch);
      for (std::size_t code = 0; code < kNumCodes; ++code) {
        if (std::isnan(expected[code])) {
          ASSERT_TRUE(std::isnan(found[code])) << code;
        } else {
          ASSERT_EQ(static_cast<double>(found[code]), expected[code]) << code;
        }
      }
    }
  });
}

// Shows D7.
TEST(PooledTest, NothingToLookUpIsNoWork) {
  std::vector<Table> tables{{.dtype = DType::float32, .rows = 0, .dim = 4, .bytes = {}}};
  EXPECT_TRUE(pooled(tables, Batch{}).empty());  // no features, no samples

  Batch no_samples;
  no_samples.table_of_feature = {0, 0};
  no_samples.column_of_feature = {0, 4};
  no_samples.num_columns = 8;
  EXPECT_TRUE(pooled(tables, no_samples).empty());

  Random random;
  const Batch empty_bags =
      test::random_batch(random, tables, {.table_of_feature = {0, 0}, .batch = 3});
  expect_near(pooled(tables, empty_bags), test::pooled_in_float64(tables, empty_bags, kUntouched));
}

// Shows D8.
TEST(PooledTest, AnyNumberOfThreadsGivesTheSameBits) {
  Random random;
  std::vector<Table> tables{test::random_table(random, DType::float32, 1000, 20),
                            test::random_table(random, DType::bfloat16, 1000, 33)};
  for (std::size_t i = 0; i < 2; ++i) {
    const Batch batch = test::random_batch(random, tables,
                                           {.table_of_feature = {1, 0, 1},
                                            .batch = 1500,
                                            .max_bag = 30,
                                            .weights = BatchShape::Weights::random});
    const std::vector<float> gradient = test::random_gradient(random, batch);
    const std::vector<float> one = pooled(tables, batch, 1);
    for (const int num_threads : {2, 3}) EXPECT_EQ(pooled(tables, batch, num_threads), one);

    const auto weight_gradients = [&](int num_threads) {
      std::vector<float> out(batch.ids.size());
      sample_weight_gradients(test::views_of(tables), batch.bags(),
                              {.data = gradient.data(), .stride = batch.num_columns}, out.data(),
                              num_threads);
      return out;
    };
    EXPECT_EQ(weight_gradients(3), weight_gradients(1));
  }
}

// Shows D8.
TEST(PooledTest, GradientsOfSampleWeightsEqualThoseInFloat64) {
  test::with_every_instruction_set([] {
    Random random;
    for (const DType dtype : test::kDTypes) {
      for (const std::int64_t dim : test::kDims) {
        SCOPED_TRACE(std::string(dtype_name(dtype)) + ", dim " + std::to_string(dim));
        std::vector<Table> tables{test::random_table(random, dtype, 50, dim)};
        const Batch batch =
            test::random_batch(random, tables, {.table_of_feature = {0, 0}, .batch = 9});
        const std::vector<float> gradient = test::random_gradient(random, batch);
        std::vector<float> found(batch.ids.size(), kUntouched);
        sample_weight_gradients(test::views_of(tables), batch.bags(),
                                {.data = gradient.data(), .stride = batch.num_columns},
                                found.data(), 1);

        expect_near(found, test::weight_gradients_in_float64(tables, batch, gradient));
      }
    }
  });
}

}  // namespace
}  // namespace tessera::embedding
