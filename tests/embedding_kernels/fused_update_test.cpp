#include "embedding_kernels/fused_update.h"

#include <gmock/gmock.h>

#include <bit>
#include <cmath>
#include <limits>

#include "base/cast.h"
#include "embedding_kernels/batches.h"
#include "embedding_kernels/pooled.h"
#include "embedding_kernels/reference_optimizer.h"

namespace tessera::embedding {
namespace {

using test::Batch;
using test::BatchShape;
using test::Random;
using test::ReferenceOptimizer;
using test::Table;

/// A table with its optimizer's state, as a module would hold them.
struct Trained {
  Table table;
  FusedOptimizer optimizer;
  std::vector<float> sum, exp_avg, exp_avg_sq;  // [rows, dim]
  std::vector<float> row_sum, row_exp_avg_sq;   // [rows]
  std::int64_t num_steps = 0;

  Trained(Table trained_table, const FusedOptimizer& its_optimizer)
      : table(std::move(trained_table)), optimizer(its_optimizer) {
    const auto rows = static_cast<std::size_t>(table.rows);
    for (auto* state : {&sum, &exp_avg, &exp_avg_sq}) {
      state->resize(rows * static_cast<std::size_t>(table.dim));
    }
    for (auto* state : {&row_sum, &row_exp_avg_sq}) state->resize(rows);
  }

  /// Begins a step of this table, which has that number.
  TableUpdate next(int number) {
    return {.table = number,
            .view = table.view(),
            .optimizer = optimizer,
            .state = {.sum = sum.data(),
                      .row_sum = row_sum.data(),
                      .exp_avg = exp_avg.data(),
                      .exp_avg_sq = exp_avg_sq.data(),
                      .row_exp_avg_sq = row_exp_avg_sq.data(),
                      .step = ++num_steps}};
  }

  bool operator==(const Trained& other) const {
    return table.bytes == other.table.bytes && sum == other.sum && exp_avg == other.exp_avg &&
           exp_avg_sq == other.exp_avg_sq && row_sum == other.row_sum &&
           row_exp_avg_sq == other.row_exp_avg_sq;
  }
};

TouchedRows touched_by(std::vector<Table> tables, const Batch& batch, int num_threads = 1) {
  return touched_rows(test::views_of(tables), batch.bags(), num_threads);
}

PooledGradient view(const std::vector<float>& gradient, const Batch& batch, float scale = 1) {
  return {.data = gradient.data(), .stride = batch.num_columns, .scale = scale};
}

void train(std::vector<Trained>& trained, const Batch& batch, const std::vector<float>& gradient,
           float scale = 1, int num_threads = 1) {
  std::vector<Table> tables;
  std::vector<TableUpdate> updates;
  for (Trained& each : trained) {
    updates.push_back(each.next(static_cast<int>(tables.size())));
    tables.push_back(each.table);
  }
  fused_update(updates, touched_by(tables, batch, num_threads), view(gradient, batch, scale),
               num_threads);
}

/// Where g and its decay cancel, Adagrad's first step is g / (|g| + eps): no smaller an eps, or it
/// would say what is left of a rounding.
std::vector<FusedOptimizer> optimizers() {
  return {Sgd{.lr = 0.1},
          Sgd{.lr = 0.1, .weight_decay = 0.01, .max_gradient = 0.5},
          Adagrad{.lr = 0.1, .eps = 1e-6},
          Adagrad{.lr = 0.1, .eps = 1e-3, .weight_decay = 0.01, .max_gradient = 0.5},
          RowWiseAdagrad{.lr = 0.1, .eps = 1e-6},
          RowWiseAdagrad{.lr = 0.1, .eps = 1e-3, .weight_decay = 0.01, .max_gradient = 0.5},
          Adam{.lr = 0.01},
          Adam{.lr = 0.01, .weight_decay = 0.01, .max_gradient = 0.5},
          RowWiseAdam{.lr = 0.01},
          RowWiseAdam{.lr = 0.01, .weight_decay = 0.01, .max_gradient = 0.5}};
}

template <class Number>
void expect_near(const std::vector<Number>& found, const std::vector<double>& expected,
                 double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(found[i]), expected[i], tolerance * (1 + std::abs(expected[i])))
        << "element " << i;
  }
}

void expect_equal(const Trained& found, const ReferenceOptimizer& expected) {
  // A weight may round to the other neighbour once; float32 gathers some roundings.
  const double tolerance = 4 * test::precision(found.table.dtype) + 2e-6;
  expect_near(found.table.values(), expected.weights(), tolerance);
  constexpr double kStateTolerance = 2e-5;
  // Weight decay brings the roundings of a small weight into the state.
  const double decayed =
      found.table.dtype == DType::float32 ? 0 : test::precision(found.table.dtype);
  expect_near(found.sum, expected.sum(), kStateTolerance + decayed);
  expect_near(found.row_sum, expected.row_sum(), kStateTolerance + decayed);
  expect_near(found.exp_avg, expected.exp_avg(), kStateTolerance);
  expect_near(found.exp_avg_sq, expected.exp_avg_sq(), kStateTolerance);
  expect_near(found.row_exp_avg_sq, expected.row_exp_avg_sq(), kStateTolerance);
}

// Shows D9.
TEST(FusedUpdateTest, StepsEqualTheDefinitionsInFloat64) {
  test::with_every_instruction_set([] {
    Random random;
    for (const FusedOptimizer& optimizer : optimizers()) {
      for (const DType dtype : test::kDTypes) {
        for (const std::int64_t dim : test::kDims) {
          SCOPED_TRACE("optimizer " + std::to_string(optimizer.index()) + ", " +
                       std::string(dtype_name(dtype)) + ", dim " + std::to_string(dim));
          std::vector<Trained> trained;
          std::vector<ReferenceOptimizer> references;
          std::vector<Table> tables;
          for (const std::int64_t rows : {40, 5}) {
            trained.emplace_back(test::random_table(random, dtype, rows, dim), optimizer);
            references.emplace_back(trained.back().table, optimizer);
            tables.push_back(trained.back().table);
          }
          for (int step = 0; step < 4; ++step) {
            const Batch batch = test::random_batch(random, tables,
                                                   {.table_of_feature = {0, 1, 0},
                                                    .batch = 6,
                                                    .weights = BatchShape::Weights::random});
            const std::vector<float> gradient = test::random_gradient(random, batch);
            train(trained, batch, gradient, 0.5F);
            for (std::size_t i = 0; i < 2; ++i) {
              references[i].step(
                  test::summed_gradients(batch, static_cast<int>(i), dim, gradient, 0.5));
            }
          }
          for (std::size_t i = 0; i < 2; ++i) expect_equal(trained[i], references[i]);
          if (testing::Test::HasFatalFailure()) return;
        }
      }
    }
  });
}

// Shows D9.
TEST(FusedUpdateTest, AnyNumberOfThreadsGivesTheSameBits) {
  Random random;
  for (const FusedOptimizer& optimizer : optimizers()) {
    SCOPED_TRACE(optimizer.index());
    const std::vector<Table> tables{test::random_table(random, DType::float32, 9000, 20),
                                    test::random_table(random, DType::bfloat16, 300, 33)};
    const Batch batch = test::random_batch(random, tables,
                                           {.table_of_feature = {1, 0, 1},
                                            .batch = 3000,
                                            .max_bag = 12,
                                            .hot_percent = 20,
                                            .weights = BatchShape::Weights::random});
    std::vector<float> gradient = test::random_gradient(random, batch);
    for (float& element : gradient) element *= 0.1F;  // sums are rounded

    std::vector<Trained> start;
    for (const Table& table : tables) start.emplace_back(table, optimizer);
    std::vector<Trained> one = start;
    train(one, batch, gradient, 1, 1);
    for (const int num_threads : {2, 3}) {
      std::vector<Trained> several = start;
      train(several, batch, gradient, 1, num_threads);
      EXPECT_EQ(several, one) << num_threads << " threads";
    }
  }
}

/// [Note: Order of sums] to the bit: with weights of 1, every operation is one float32 addition.
/// Shows D9.
TEST(FusedUpdateTest, DuplicatesAreSummedInTheOrderOfTheBatch) {
  test::with_every_instruction_set([] {
    Random random;
    constexpr std::int64_t kDim = 37;
    const std::vector<Table> tables{test::random_table(random, DType::float32, 3, kDim)};
    Batch batch = test::random_batch(
        random, tables,
        {.table_of_feature = {0, 0}, .batch = 1500, .max_bag = 6, .hot_percent = 85});
    for (std::size_t place = 0; place < batch.ids.size(); place += 5) batch.ids[place] = 2;
    std::vector<float> gradient = test::random_gradient(random, batch);
    for (float& element : gradient) element *= 0.1F;

    std::map<std::int64_t, std::vector<const float*>> bags;  // the gradients of each row
    batch.for_places([&](std::size_t feature, std::int64_t sample, std::size_t place) {
      bags[batch.ids[place]].push_back(gradient.data() + sample * batch.num_columns +
                                       batch.column_of_feature[feature]);
    });
    ASSERT_GT(bags[0].size(), 3U * TouchedRows::kBlockOccurrences);
    ASSERT_LT(bags[1].size(), 1U * TouchedRows::kBlockOccurrences);
    ASSERT_GT(bags[2].size(), 1U * TouchedRows::kBlockOccurrences);

    std::vector<float> expected(3 * kDim);
    for (const auto& [row, gradients] : bags) {
      for (std::size_t begin = 0; begin < gradients.size();
           begin += TouchedRows::kBlockOccurrences) {
        const std::size_t end = std::min(begin + TouchedRows::kBlockOccurrences, gradients.size());
        for (std::int64_t k = 0; k < kDim; ++k) {
          float block = 0;
          for (std::size_t i = begin; i < end; ++i) block += gradients[i][k];
          expected[static_cast<std::size_t>(row * kDim + k)] += block;
        }
      }
    }
    std::vector<float> found(expected.size());
    add_dense_gradient(touched_by(tables, batch), 0, kDim, view(gradient, batch), found.data(), 2);
    EXPECT_EQ(found, expected);
  });
}

// Shows D9.
TEST(FusedUpdateTest, TwoPhasesGiveTheBitsOfOne) {
  Random random;
  for (const FusedOptimizer& optimizer : optimizers()) {
    for (const DType dtype : test::kDTypes) {
      SCOPED_TRACE(std::to_string(optimizer.index()) + " " + std::string(dtype_name(dtype)));
      constexpr std::int64_t kDim = 43;
      const Table table = test::random_table(random, dtype, 3000, kDim);
      const Batch batch = test::random_batch(
          random, {table},
          {.table_of_feature = {0, 0}, .batch = 1500, .max_bag = 4, .hot_percent = 30});
      const std::vector<float> gradient = test::random_gradient(random, batch);
      std::vector<Trained> at_once;
      at_once.emplace_back(table, optimizer);
      train(at_once, batch, gradient, 0.3F, 2);

      Trained in_two(table, optimizer);
      const TouchedRows touched = touched_by({table}, batch);
      const TableUpdate update = in_two.next(0);
      std::vector<float> squares(touched[0].rows.size());
      std::vector<float> gradients(squares.size() * kDim);
      row_gradients(update, touched, view(gradient, batch, 0.3F), gradients.data(), squares.data(),
                    2);
      apply_row_gradients(update, touched, gradients.data(), squares.data(), kDim, 2);
      EXPECT_EQ(in_two, at_once[0]);
    }
  }
}

/// Returns columns [begin, end) of a table.
Table columns_of(const Table& table, std::int64_t begin, std::int64_t end) {
  const std::vector<double> values = table.values();
  std::vector<double> shard;
  for (std::int64_t row = 0; row < table.rows; ++row) {
    const auto first = values.begin() + row * table.dim;
    shard.insert(shard.end(), first + begin, first + end);
  }
  return {.dtype = table.dtype,
          .rows = table.rows,
          .dim = end - begin,
          .bytes = test::stored(table.dtype, shard)};
}

// Shows D9.
TEST(FusedUpdateTest, ATableCutByColumnsIsUpdatedAsTheWholeOne) {
  Random random;
  for (const FusedOptimizer& optimizer : optimizers()) {
    SCOPED_TRACE(optimizer.index());
    constexpr std::int64_t kDim = 30;
    constexpr std::int64_t kCut = 11;
    const Table table = test::random_table(random, DType::float32, 50, kDim);
    const Batch batch = test::random_batch(random, {table}, {.table_of_feature = {0}, .batch = 40});
    const std::vector<float> gradient = test::random_gradient(random, batch);
    std::vector<Trained> whole;
    whole.emplace_back(table, optimizer);
    train(whole, batch, gradient);

    std::vector<Trained> shards;
    shards.emplace_back(columns_of(table, 0, kCut), optimizer);
    shards.emplace_back(columns_of(table, kCut, kDim), optimizer);
    const TouchedRows touched = touched_by({table}, batch);
    std::vector<TableUpdate> updates;
    std::vector<std::vector<float>> gradients, squares;
    for (Trained& shard : shards) {
      updates.push_back(shard.next(0));
      gradients.emplace_back(touched[0].rows.size() * static_cast<std::size_t>(shard.table.dim));
      squares.emplace_back(touched[0].rows.size());
      PooledGradient columns = view(gradient, batch);
      columns.data += &shard == shards.data() ? 0 : kCut;
      row_gradients(updates.back(), touched, columns, gradients.back().data(),
                    squares.back().data(), 1);
    }
    std::vector<float> summed = squares[0];
    for (std::size_t i = 0; i < summed.size(); ++i) summed[i] += squares[1][i];
    for (std::size_t i = 0; i < 2; ++i) {
      apply_row_gradients(updates[i], touched, gradients[i].data(), summed.data(), kDim, 1);
    }

    expect_near(shards[0].table.values(), columns_of(whole[0].table, 0, kCut).values(), 1e-6);
    expect_near(shards[1].table.values(), columns_of(whole[0].table, kCut, kDim).values(), 1e-6);
    const std::vector<double> row_sum(whole[0].row_sum.begin(), whole[0].row_sum.end());
    expect_near(shards[0].row_sum, row_sum, 1e-6);
    EXPECT_EQ(shards[0].row_sum, shards[1].row_sum);  // or the ranks would drift apart
    EXPECT_EQ(shards[0].row_exp_avg_sq, shards[1].row_exp_avg_sq);
  }
}

/// One row, whose gradient is given.
struct OneRow {
  Trained trained;
  Batch batch{};

  OneRow(DType dtype, std::span<const double> weights, const FusedOptimizer& optimizer)
      : trained({.dtype = dtype,
                 .rows = 1,
                 .dim = static_cast<std::int64_t>(weights.size()),
                 .bytes = test::stored(dtype, weights)},
                optimizer) {
    batch.table_of_feature = {0};
    batch.column_of_feature = {0};
    batch.batch = 1;
    batch.ids = {0};
    batch.offsets = {0, 1};
    batch.num_columns = trained.table.dim;
  }

  std::vector<double> after(const std::vector<float>& gradient) {
    const TableUpdate update = trained.next(0);
    fused_update({&update, 1}, touched_by({trained.table}, batch), view(gradient, batch), 1);
    return trained.table.values();
  }
};

// Shows D9.
TEST(FusedUpdateTest, WeightsAreRoundedToTheNearestTiesToEven) {
  test::with_every_instruction_set([] {
    for (const DType dtype : {DType::float16, DType::bfloat16}) {
      SCOPED_TRACE(dtype_name(dtype));
      // From zero by lr 1: the new weight is the negated gradient, of any float32.
      Random random;
      std::vector<float> gradient{0.0F,
                                  1.0F,
                                  1e30F,
                                  -1e30F,
                                  65504.0F,
                                  65519.0F,
                                  65520.0F,
                                  1e-7F,
                                  -3e-8F,
                                  std::numeric_limits<float>::max(),
                                  std::numeric_limits<float>::infinity()};
      for (int i = 0; i < 20'000; ++i) {
        const auto exponent = static_cast<std::uint32_t>(random.between(127 - 30, 127 + 18));
        // Half of them lie in the middle of two numbers, or next to it.
        const auto fraction = static_cast<std::uint32_t>(random.between(0, 1 << 23));
        const std::uint32_t near_tie =
            (fraction & 0x7FFF0000U) | (dtype == DType::bfloat16 ? 0x8000U : 0x1000U);
        const auto offset = static_cast<std::uint32_t>(random.between(0, 3)) - 1U;
        const std::uint32_t bits =
            exponent << 23 | (i % 2 == 0 ? fraction : (near_tie + offset) & 0x7FFFFFU);
        gradient.push_back(std::bit_cast<float>(bits | (i % 3 == 0 ? 0x80000000U : 0U)));
      }
      const std::vector<double> zeros(gradient.size());
      OneRow row(dtype, zeros, Sgd{.lr = 1});
      const std::vector<double> found = row.after(gradient);
      std::vector<double> negated;
      for (const float element : gradient) negated.push_back(-static_cast<double>(element));
      EXPECT_EQ(found, test::read(dtype, test::stored(dtype, negated)));
    }
  });
}

// Shows D9.
TEST(FusedUpdateTest, NanGradientsAreNotClippedAway) {
  test::with_every_instruction_set([] {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const std::vector<double> weights(21, 1.0);
    for (const DType dtype : test::kDTypes) {
      OneRow row(dtype, weights, Sgd{.lr = 1, .max_gradient = 0.5});
      std::vector<float> gradient(21, 2.0F);
      gradient[3] = nan;
      gradient[20] = nan;
      gradient[4] = -2.0F;
      const std::vector<double> found = row.after(gradient);
      for (std::size_t k = 0; k < found.size(); ++k) {
        if (k == 3 || k == 20) {
          EXPECT_TRUE(std::isnan(found[k])) << k;
        } else {
          EXPECT_EQ(found[k], k == 4 ? 1.5 : 0.5) << k;
        }
      }
    }
  });
}

// Shows D9.
TEST(FusedUpdateTest, RowsThatAreNotTouchedStayAsTheyWere) {
  Random random;
  for (const FusedOptimizer& optimizer : optimizers()) {
    const Table table = test::random_table(random, DType::float32, 40, 5);
    std::vector<Trained> trained;
    trained.emplace_back(table, optimizer);
    std::ranges::fill(trained[0].exp_avg, 1.0F);  // would move a weight
    Batch batch;
    batch.table_of_feature = {0};
    batch.column_of_feature = {0};
    batch.batch = 1;
    batch.ids = {7};
    batch.offsets = {0, 1};
    batch.num_columns = 5;
    train(trained, batch, std::vector<float>(5, 1.0F));
    const std::vector<double> before = table.values();
    const std::vector<double> after = trained[0].table.values();
    for (std::size_t i = 0; i < before.size(); ++i) {
      const bool is_touched = i / 5 == 7;
      EXPECT_EQ(after[i] == before[i], !is_touched) << i;
      EXPECT_EQ(is_touched || trained[0].exp_avg[i] == 1.0F, true) << i;
    }
  }
}

// Shows D9.
TEST(FusedUpdateTest, DenseGradientsAreAdded) {
  Random random;
  for (const std::int64_t dim : test::kDims) {
    SCOPED_TRACE(dim);
    const std::vector<Table> tables{test::random_table(random, DType::bfloat16, 20, dim),
                                    test::random_table(random, DType::float32, 30, dim)};
    const Batch batch = test::random_batch(
        random, tables,
        {.table_of_feature = {1, 0, 1}, .batch = 12, .weights = BatchShape::Weights::random});
    const std::vector<float> gradient = test::random_gradient(random, batch);
    std::vector<float> found(static_cast<std::size_t>(30 * dim), 3.0F);
    add_dense_gradient(touched_by(tables, batch), 1, dim, view(gradient, batch, 0.25F),
                       found.data(), 2);
    std::vector<double> expected(found.size(), 3.0);
    for (const auto& [row, sum] : test::summed_gradients(batch, 1, dim, gradient, 0.25)) {
      for (std::size_t k = 0; k < sum.size(); ++k) {
        expected[static_cast<std::size_t>(row * dim) + k] += sum[k];
      }
    }
    expect_near(found, expected, 1e-6);
  }
}

// Shows D7.
TEST(FusedUpdateTest, NothingTouchedIsNoUpdate) {
  Random random;
  for (const FusedOptimizer& optimizer : optimizers()) {
    std::vector<Trained> trained;
    trained.emplace_back(Table{.dtype = DType::float32, .rows = 0, .dim = 4, .bytes = {}},
                         optimizer);
    trained.emplace_back(test::random_table(random, DType::float16, 5, 4), optimizer);
    const Trained before = trained[1];
    train(trained, Batch{}, {});
    EXPECT_EQ(trained[1], before);
    fused_update({}, touched_by({}, Batch{}), {.data = nullptr, .stride = 0}, 2);
  }
}

}  // namespace
}  // namespace tessera::embedding
