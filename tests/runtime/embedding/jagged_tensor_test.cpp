#include <gmock/gmock.h>
#include <torch/torch.h>

#include <random>

#include "runtime/embedding/tables.h"
#include "support/error_matchers.h"
#include "tessera/base/error.h"
#include "tessera/runtime/embedding/jagged_tensor.h"

// Shows D8. Bags of ids and what can be done with them.

namespace tessera {
namespace {

using test::longs;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

/// Two features, three samples.
KeyedJaggedTensor some_batch(const at::Tensor& weights = {}) {
  return KeyedJaggedTensor::from_lengths({"a", "b"}, longs({1, 2, 3, 4, 5, 6}),
                                         longs({2, 0, 1, 0, 3, 0}), weights);
}

std::string refusal_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

KeyedJaggedTensor random_batch(std::uint64_t seed, const std::vector<std::string>& keys,
                               std::int64_t batch_size, bool has_weights) {
  std::mt19937_64 engine(seed);
  std::vector<std::int64_t> lengths, values;
  for (std::size_t bag = 0; bag < keys.size() * static_cast<std::size_t>(batch_size); ++bag) {
    lengths.push_back(static_cast<std::int64_t>(engine() % 4));
    for (std::int64_t i = 0; i < lengths.back(); ++i) {
      values.push_back(static_cast<std::int64_t>(engine() % 100));
    }
  }
  at::Tensor weights;
  if (has_weights) weights = torch::arange(static_cast<std::int64_t>(values.size())).to(at::kFloat);
  return KeyedJaggedTensor::from_lengths(keys, longs(values), longs(lengths), weights);
}

void expect_equal(const KeyedJaggedTensor& a, const KeyedJaggedTensor& b) {
  EXPECT_EQ(a.keys(), b.keys());
  EXPECT_EQ(a.batch_size(), b.batch_size());
  EXPECT_TRUE(torch::equal(a.values(), b.values()));
  EXPECT_TRUE(torch::equal(a.lengths(), b.lengths()));
  EXPECT_TRUE(torch::equal(a.offsets(), b.offsets()));
  EXPECT_EQ(a.has_weights(), b.has_weights());
  if (a.has_weights() && b.has_weights()) {
    EXPECT_TRUE(torch::equal(a.weights(), b.weights()));
  }
}

// Shows D8.
TEST(JaggedTensorTest, BagsAreCutByLengthsOrOffsets) {
  const JaggedTensor bags = JaggedTensor::from_lengths(longs({7, 8, 9}), longs({1, 0, 2}));
  EXPECT_TRUE(torch::equal(bags.offsets(), longs({0, 1, 1, 3})));
  const auto dense = bags.to_dense();
  ASSERT_EQ(dense.size(), 3U);
  EXPECT_TRUE(torch::equal(dense[0], longs({7})));
  EXPECT_EQ(dense[1].numel(), 0);
  EXPECT_TRUE(torch::equal(dense[2], longs({8, 9})));
  const JaggedTensor same = JaggedTensor::from_offsets(longs({7, 8, 9}), bags.offsets());
  EXPECT_TRUE(torch::equal(same.lengths(), bags.lengths()));
}

// Shows D8.
TEST(KeyedJaggedTensorTest, BagsAreFeatureMajor) {
  const KeyedJaggedTensor batch = some_batch(torch::arange(6).to(at::kFloat));
  EXPECT_EQ(batch.batch_size(), 3);
  EXPECT_TRUE(torch::equal(batch["b"].values(), longs({4, 5, 6})));
  EXPECT_TRUE(torch::equal(batch["b"].offsets(), longs({0, 0, 3, 3})));
  EXPECT_TRUE(torch::equal(batch["b"].weights(), torch::tensor({3.0F, 4.0F, 5.0F})));
  EXPECT_THAT(refusal_of([&] {
                KeyedJaggedTensor::from_dict({{"a", batch["a"]}, {"a", batch["b"]}});
              }),
              HasSubstr("'a' twice"));
}

// Shows D8.
TEST(KeyedJaggedTensorTest, Laws) {
  const std::vector<std::string> keys = {"a", "b", "c", "d", "e"};
  for (std::uint64_t seed = 0; seed < 60; ++seed) {
    const auto batch_size = static_cast<std::int64_t>(seed % 4);
    const KeyedJaggedTensor batch = random_batch(seed, keys, batch_size, seed % 2 == 0);
    expect_equal(KeyedJaggedTensor::from_dict(batch.to_dict()), batch);
    expect_equal(
        KeyedJaggedTensor::from_offsets(keys, batch.values(), batch.offsets(), batch.weights()),
        batch);
    const std::vector<std::int64_t> sizes = {2, 0, 3};
    const auto batches = batch.split(sizes);
    ASSERT_EQ(batches.size(), 3U);
    EXPECT_THAT(batches[0].keys(), ElementsAre("a", "b"));
    expect_equal(KeyedJaggedTensor::concat({{batches[0], batches[2]}}), batch);
    const std::vector<std::int64_t> there = {3, 0, 4, 2, 1};
    const std::vector<std::int64_t> back = {1, 4, 3, 0, 2};
    expect_equal(batch.permute(there).permute(back), batch);
    EXPECT_TRUE(torch::equal(batch.permute(there)["c"].values(), batch["c"].values()));
    expect_equal(batch.to(at::kCPU), batch);
  }
}

// Shows D8.
TEST(KeyedJaggedTensorTest, NothingInIt) {
  const KeyedJaggedTensor none = KeyedJaggedTensor::empty();
  EXPECT_EQ(none.batch_size(), 0);
  EXPECT_TRUE(torch::equal(none.offsets(), longs({0})));
  const KeyedJaggedTensor bags = KeyedJaggedTensor::empty({"a", "b"}, 4);
  EXPECT_EQ(bags.batch_size(), 4);
  EXPECT_EQ(bags["b"].values().numel(), 0);
}

// Shows D8.
TEST(KeyedJaggedTensorTest, WhatDoesNotFitIsRefusedByFeatureAndSample) {
  const auto from_lengths = [](std::vector<std::int64_t> lengths) {
    return refusal_of([&] {
      KeyedJaggedTensor::from_lengths({"a", "b"}, longs({1, 2, 3}), longs(lengths));
    });
  };
  EXPECT_THAT(from_lengths({1, -1, 1, 2}),
              AllOf(HasSubstr("feature 'a', sample 1"), HasSubstr("found -1")));
  EXPECT_THAT(from_lengths({1, 0, 1, 2}),
              AllOf(HasSubstr("feature 'b', sample 1"), HasSubstr("found 2")));
  EXPECT_THAT(from_lengths({1, 0, 1, 0}), HasSubstr("sum of lengths: expected 3"));
  EXPECT_THAT(from_lengths({1, 1, 1}), HasSubstr("a multiple of the 2 keys"));
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  EXPECT_THAT(from_lengths({2, huge, 1, 0}), HasSubstr("feature 'a', sample 1"));
  const auto from_offsets = [](std::vector<std::int64_t> offsets) {
    return refusal_of([&] {
      KeyedJaggedTensor::from_offsets({"a", "b"}, longs({1, 2, 3}), longs(offsets));
    });
  };
  EXPECT_THAT(from_offsets({0, 2, 1, 3, 3}), HasSubstr("feature 'a', sample 1"));
  EXPECT_THAT(from_offsets({1, 2, 2, 3, 3}), HasSubstr("first offset"));
  EXPECT_THAT(from_offsets({0, 1, 2, 2, 2}), HasSubstr("last offset"));
  EXPECT_THAT(refusal_of([] { some_batch(torch::zeros({2})); }), HasSubstr("weights"));
  EXPECT_THAT(
      refusal_of([] { KeyedJaggedTensor::from_lengths({"a"}, torch::zeros({2}), longs({2})); }),
      HasSubstr("int32 or int64"));
  EXPECT_THAT(refusal_of([] { some_batch().split(std::vector<std::int64_t>{1}); }),
              HasSubstr("sizes to split by"));
  EXPECT_THAT(refusal_of([] { some_batch().permute(std::vector<std::int64_t>{2}); }),
              HasSubstr("position of a key"));
  EXPECT_THROW(some_batch()["c"], Error);
}

// Shows D8.
TEST(KeyedTensorTest, ColumnsHaveNamesAndCanBeRegrouped) {
  const KeyedTensor one({"a", "b"}, {2, 1}, torch::arange(6).view({2, 3}));
  const KeyedTensor two({"c"}, {1}, torch::tensor({{10}, {11}}));
  EXPECT_TRUE(torch::equal(one["b"], torch::tensor({{2}, {5}})));
  EXPECT_EQ(one.to_dict().size(), 2U);
  const std::vector<KeyedTensor> both = {one, two};
  const std::vector<std::vector<std::string>> groups = {{"c", "a"}, {"b"}};
  const auto regrouped = KeyedTensor::regroup(both, groups);
  ASSERT_EQ(regrouped.size(), 2U);
  EXPECT_TRUE(torch::equal(regrouped[0], torch::tensor({{10, 0, 1}, {11, 3, 4}})));
  EXPECT_THAT(refusal_of([] {
                KeyedTensor({"a"}, {2}, torch::zeros({2, 3}));
              }),
              HasSubstr("shape [B, 2]"));
  EXPECT_THROW(one["c"], Error);
}

}  // namespace
}  // namespace tessera
