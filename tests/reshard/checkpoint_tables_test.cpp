#include "reshard/checkpoint_tables.h"

#include <gtest/gtest.h>

#include <numeric>

#include "support/error_matchers.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointContents;
using formats::StateKind;

void add(CheckpointContents& contents, const std::string& fqn, const Shape& shape,
         DType dtype = DType::float32, StateKind kind = StateKind::plain,
         const std::string& parameter = "") {
  formats::TensorEntry entry;
  entry.meta = {fqn, dtype, shape};
  entry.kind = kind;
  entry.parameter = parameter;
  entry.pieces = {{whole_box(shape), 0}};
  contents.tensors.push_back(entry);
}

std::vector<TableSize> tables_of(const CheckpointContents& contents) {
  std::vector<std::size_t> all(contents.tensors.size());
  std::iota(all.begin(), all.end(), std::size_t{0});
  return checkpoint_tables(contents, all, "src");
}

// Shows D10.
TEST(CheckpointTablesTest, TablesComeWithTheBytesOfTheirState) {
  CheckpointContents contents;
  const std::string weight = "model.embedding_bags.t0.weight";
  add(contents, weight, {10, 4}, DType::bfloat16);
  add(contents, "optim.state.embedding_bags.t0.weight.exp_avg", {10, 4}, DType::float32,
      StateKind::pointwise, weight);
  add(contents, "optim.state.embedding_bags.t0.weight.exp_avg_sq", {10, 4}, DType::bfloat16,
      StateKind::pointwise, weight);
  add(contents, "optim.state.embedding_bags.t0.weight.momentum", {10}, DType::float32,
      StateKind::row_wise, weight);
  add(contents, "optim.state.embedding_bags.t0.weight.step", {}, DType::float32,
      StateKind::scalar_parameter, weight);
  const std::vector<TableSize> tables = tables_of(contents);
  ASSERT_EQ(tables.size(), 1U);
  EXPECT_EQ(tables[0].name, "t0");
  EXPECT_EQ(tables[0].rows, 10);
  EXPECT_EQ(tables[0].columns, 4);
  EXPECT_EQ(tables[0].dtype, DType::bfloat16);
  EXPECT_EQ(tables[0].state_nbytes_per_element, 6U);
  EXPECT_EQ(tables[0].state_nbytes_per_row, 4U);
}

// Shows D10.
TEST(CheckpointTablesTest, WhatIsNoMatrixOrHasAnotherNameIsNoTable) {
  CheckpointContents contents;
  add(contents, "embeddings.norm.weight", {4});
  add(contents, "fc.weight", {4, 4});
  EXPECT_TRUE(tables_of(contents).empty());
}

// Shows D10.
TEST(CheckpointTablesTest, TwoTablesOfOneNameAreRefusedUnlessOneIsSelected) {
  CheckpointContents contents;
  add(contents, "a.embedding_bags.t0.weight", {4, 4});
  add(contents, "b.embedding_bags.t0.weight", {5, 4});
  EXPECT_THAT([&] { tables_of(contents); },
              test::ThrowsError(ErrorKind::mismatch, "src: b.embedding_bags.t0.weight: table t0"));
  const std::vector<std::size_t> second{1};
  EXPECT_EQ(checkpoint_tables(contents, second, "src")[0].rows, 5);
}

}  // namespace
}  // namespace tessera::reshard
