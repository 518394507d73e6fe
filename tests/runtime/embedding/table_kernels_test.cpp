#include "runtime/embedding/table_kernels.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <random>

#include "runtime/embedding/tables.h"
#include "support/random.h"

// Kernels made of ATen's operators give the same results as Tessera's kernels for the CPU.

namespace tessera {
namespace {

using embedding::FeatureBags;
using embedding::FusedOptimizer;
using embedding::FusedState;
using embedding::OutputGradient;
using embedding::TableKernels;
using embedding::TableTensors;

struct KernelOptions {
  at::ScalarType dtype = at::kFloat;
  bool is_weighted = false;
};

constexpr std::int64_t kNumSamples = 37;
constexpr std::int64_t kWidth = 41;

/// Three tables, one without rows that are looked up; four features, two of one table.
struct Lookups {
  std::vector<at::Tensor> weights;
  std::vector<FusedState> states;
  std::vector<int> table_of_feature{0, 1, 0, 2};
  std::vector<std::int64_t> column_of_feature{0, 12, 20, 32};
  std::vector<std::int64_t> feature_begins{0};
  at::Tensor ids, offsets, sample_weights, gradient;

  std::vector<TableTensors> tables() const {
    std::vector<TableTensors> tables;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      tables.push_back({weights[i], states.empty() ? nullptr : &states[i]});
    }
    return tables;
  }
  FeatureBags bags() const {
    return {table_of_feature, column_of_feature, kNumSamples,   ids,
            offsets,          sample_weights,    feature_begins};
  }
};

Lookups drawn(const KernelOptions& options, const std::optional<FusedOptimizer>& optimizer,
              std::uint64_t seed) {
  std::mt19937_64 engine(seed);
  const auto below = [&](std::int64_t end) {
    return std::uniform_int_distribution<std::int64_t>(0, end - 1)(engine);
  };
  torch::manual_seed(seed);
  Lookups lookups;
  constexpr std::int64_t kShapes[][2] = {{50, 12}, {4, 8}, {6, 9}};
  for (const auto& [rows, dim] : kShapes) {
    lookups.weights.push_back(torch::rand({rows, dim}).add(0.1).to(options.dtype));
    if (!optimizer) continue;
    FusedState& state =
        lookups.states.emplace_back(embedding::initial_state(*optimizer, rows, dim));
    for (FusedState::Slot& slot : state.slots) slot.tensor.uniform_(0.1, 1);
    state.step = 3;
  }
  std::vector<std::int64_t> ids, offsets{0};
  for (std::size_t feature = 0; feature < 4; ++feature) {
    const int table = lookups.table_of_feature[feature];
    for (std::int64_t sample = 0; sample < kNumSamples; ++sample) {
      const std::int64_t length = table == 2 ? 0 : below(4);  // many are empty
      for (std::int64_t i = 0; i < length; ++i) ids.push_back(below(kShapes[table][0]));
      offsets.push_back(static_cast<std::int64_t>(ids.size()));
    }
    lookups.feature_begins.push_back(static_cast<std::int64_t>(ids.size()));
  }
  lookups.ids = torch::tensor(ids, at::kLong);
  lookups.offsets = torch::tensor(offsets, at::kLong);
  if (options.is_weighted) lookups.sample_weights = torch::rand({lookups.ids.numel()});
  lookups.gradient = torch::rand({kNumSamples, kWidth}).add(0.05);
  return lookups;
}

Lookups copy_of(const Lookups& lookups) {
  Lookups copy = lookups;
  for (at::Tensor& weight : copy.weights) weight = weight.clone();
  for (FusedState& state : copy.states) {
    for (FusedState::Slot& slot : state.slots) slot.tensor = slot.tensor.clone();
  }
  return copy;
}

void expect_close(const at::Tensor& found, const at::Tensor& expected, double tolerance,
                  const std::string& what) {
  ASSERT_EQ(found.sizes(), expected.sizes()) << what;
  EXPECT_TRUE(torch::allclose(found.to(at::kDouble), expected.to(at::kDouble), tolerance, 1e-6))
      << what << ": "
      << (found.to(at::kDouble) - expected.to(at::kDouble)).abs().max().item<double>();
}

double tolerance_of(at::ScalarType dtype) {
  // Results that round to adjacent values of a table's dtype differ by its last bit.
  return dtype == at::kFloat ? 2e-6 : dtype == at::kHalf ? 1e-3 : 8e-3;
}

void expect_equal_tables(const Lookups& found, const Lookups& expected, at::ScalarType dtype,
                         const std::string& what) {
  for (std::size_t i = 0; i < found.weights.size(); ++i) {
    expect_close(found.weights[i], expected.weights[i], tolerance_of(dtype),
                 what + ", table " + std::to_string(i));
    for (std::size_t slot = 0; slot < found.states[i].slots.size(); ++slot) {
      expect_close(found.states[i].slots[slot].tensor, expected.states[i].slots[slot].tensor, 2e-5,
                   what + ", " + found.states[i].slots[slot].name);
    }
  }
}

class TableKernelsTest : public testing::TestWithParam<KernelOptions> {};

TEST_P(TableKernelsTest, AtenPoolsAsTheCpuDoes) {
  const Lookups lookups = drawn(GetParam(), std::nullopt, test::test_seed());
  const auto pool = [&](TableKernels& kernels) {
    at::Tensor pooled = torch::full({kNumSamples, kWidth}, 7.0F);
    kernels.pooled(lookups.tables(), lookups.bags(), pooled);
    return pooled;
  };
  expect_close(pool(*embedding::aten_table_kernels()), pool(*embedding::cpu_table_kernels()), 1e-6,
               "pooled");
  const auto weight_gradients = [&](TableKernels& kernels) {
    return kernels.sample_weight_gradients(lookups.tables(), lookups.bags(), {lookups.gradient});
  };
  expect_close(weight_gradients(*embedding::aten_table_kernels()),
               weight_gradients(*embedding::cpu_table_kernels()), 1e-6, "gradients of weights");
}

TEST_P(TableKernelsTest, AtenUpdatesAsTheCpuDoes) {
  for (const FusedOptimizer& optimizer : test::fused_optimizers()) {
    const std::string name(embedding::name_of(optimizer));
    const Lookups drawn_once = drawn(GetParam(), optimizer, test::test_seed());
    const auto updated_by = [&](TableKernels& kernels) {
      Lookups lookups = copy_of(drawn_once);
      const std::vector<int> all{0, 1, 2};
      kernels.backward(lookups.tables(), lookups.bags(), {lookups.gradient, 0.5F})
          ->fused_update(all, optimizer);
      return lookups;
    };
    const auto by_cpu = embedding::cpu_table_kernels();
    const auto by_aten = embedding::aten_table_kernels();
    expect_equal_tables(updated_by(*by_aten), updated_by(*by_cpu), GetParam().dtype, name);

    // In two phases, as for tables sharded by columns.
    const auto in_phases = [&](TableKernels& kernels) {
      Lookups lookups = copy_of(drawn_once);
      const auto backward =
          kernels.backward(lookups.tables(), lookups.bags(), {lookups.gradient, 0.5F});
      for (int table = 0; table < 3; ++table) {
        embedding::RowGradients gradients = backward->row_gradients(table, optimizer);
        gradients.squares = gradients.squares * 2;  // adds those of an equal shard on another rank
        backward->apply_row_gradients(table, optimizer, gradients,
                                      2 * lookups.weights[static_cast<std::size_t>(table)].size(1));
      }
      return lookups;
    };
    expect_equal_tables(in_phases(*by_aten), in_phases(*by_cpu), GetParam().dtype,
                        name + " in phases");

    // In one phase, with the dense gradient of a whole table.
    Lookups masked = copy_of(drawn_once);
    const auto backward =
        by_aten->backward(masked.tables(), masked.bags(), {masked.gradient, 0.5F});
    for (int table = 0; table < 3; ++table) {
      const TableTensors tensors = masked.tables()[static_cast<std::size_t>(table)];
      at::Tensor is_touched = torch::zeros({tensors.weight.size(0)}, at::kBool);
      is_touched.index_fill_(0, backward->touched_rows(table), true);
      embedding::masked_update(tensors, optimizer, backward->dense_gradient(table), is_touched);
    }
    expect_equal_tables(masked, updated_by(*by_cpu), GetParam().dtype, name + ", masked");
  }
}

TEST_P(TableKernelsTest, AtenAddsUpDenseGradientsInFloat64ToSixDigits) {
  const Lookups lookups = drawn(GetParam(), std::nullopt, test::test_seed());
  const auto backward = embedding::aten_table_kernels()->backward(lookups.tables(), lookups.bags(),
                                                                  {lookups.gradient, 0.5F});
  for (int table = 0; table < 3; ++table) {
    const at::Tensor& weight = lookups.weights[static_cast<std::size_t>(table)];
    at::Tensor expected = torch::zeros(weight.sizes(), at::kDouble);
    for (std::size_t feature = 0; feature < 4; ++feature) {
      if (lookups.table_of_feature[feature] != table) continue;
      for (std::int64_t sample = 0; sample < kNumSamples; ++sample) {
        const auto bag = static_cast<std::int64_t>(feature) * kNumSamples + sample;
        const at::Tensor of_bag = lookups.gradient[sample]
                                      .narrow(0, lookups.column_of_feature[feature], weight.size(1))
                                      .to(at::kDouble);
        for (auto i = lookups.offsets[bag].item<std::int64_t>();
             i < lookups.offsets[bag + 1].item<std::int64_t>(); ++i) {
          const double factor =
              lookups.sample_weights.defined() ? lookups.sample_weights[i].item<double>() : 1;
          expected[lookups.ids[i].item<std::int64_t>()] += of_bag * (0.5 * factor);
        }
      }
    }
    expect_close(backward->dense_gradient(table), expected, 1e-6, std::to_string(table));
  }
}

TEST(TableKernelsWithoutIdsTest, ABatchWithoutIdsUpdatesNothing) {
  for (const FusedOptimizer& optimizer : test::fused_optimizers()) {
    Lookups lookups = drawn({}, optimizer, test::test_seed());
    lookups.ids = torch::empty({0}, at::kLong);
    lookups.offsets.zero_();
    lookups.feature_begins = {0, 0, 0, 0, 0};
    const Lookups before = copy_of(lookups);
    const auto kernels = embedding::aten_table_kernels();
    at::Tensor pooled = torch::full({kNumSamples, kWidth}, 7.0F);
    kernels->pooled(lookups.tables(), lookups.bags(), pooled);
    EXPECT_EQ(pooled.narrow(1, 0, 20).abs().sum().item<double>(), 0);
    const auto backward =
        kernels->backward(lookups.tables(), lookups.bags(), {lookups.gradient, 1});
    backward->fused_update(std::vector<int>{0, 1, 2}, optimizer);
    backward->apply_row_gradients(0, optimizer, backward->row_gradients(0, optimizer), 12);
    expect_equal_tables(lookups, before, at::kFloat, "no ids");
  }
}

std::string name_of_options(const testing::TestParamInfo<KernelOptions>& info) {
  return std::string(c10::toString(info.param.dtype)) + (info.param.is_weighted ? "Weighted" : "");
}

INSTANTIATE_TEST_SUITE_P(Dtypes, TableKernelsTest,
                         testing::Values(KernelOptions{at::kFloat, false},
                                         KernelOptions{at::kFloat, true},
                                         KernelOptions{at::kHalf, true},
                                         KernelOptions{at::kBFloat16, false}),
                         name_of_options);

}  // namespace
}  // namespace tessera
