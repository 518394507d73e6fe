#include "reshard/checkpoint_tables.h"

#include <gtest/gtest.h>

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
  return checkpoint_tables(contents, table_names(contents), "src");
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
  const std::vector<TableName> second{table_names(contents)[1]};
  EXPECT_EQ(checkpoint_tables(contents, second, "src")[0].rows, 5);
}

TEST(CheckpointTablesTest, TiedTablesAreOneTableWithTheStateOfBoth) {
  CheckpointContents contents;
  add(contents, "embedding_bags.t0.weight", {10, 4});
  add(contents, "optim.state.embedding_bags.t0.weight.t0.momentum1", {10});
  add(contents, "optim.state.embedding_bags.t1.weight.t1.momentum1", {10});
  contents.aliases = {{"embedding_bags.t1.weight", "embedding_bags.t0.weight"}};
  const std::vector<TableSize> tables = tables_of(contents);
  ASSERT_EQ(tables.size(), 1U);
  EXPECT_EQ(tables[0].name, "t0");
  EXPECT_EQ(tables[0].state_nbytes_per_row, 8U);

  const std::vector<TableName> alias{table_names(contents)[1]};
  EXPECT_EQ(checkpoint_tables(contents, alias, "src")[0].name, "t1");
}

TEST(CheckpointTablesTest, ACopyThatOneRankHasIsNoTableOfItsOwn) {
  CheckpointContents contents;
  for (const std::string before : {"", "per_rank.1."}) {
    const std::string weight = before + "embedding_bags.t0.weight";
    add(contents, weight, {10, 4});
    add(contents, before + "optim.state.embedding_bags.t0.weight.momentum", {10}, DType::float32,
        StateKind::row_wise, weight);
  }
  add(contents, "per_rank.1.embedding_bags.t1.weight", {5, 4});
  const std::vector<TableSize> tables = tables_of(contents);
  ASSERT_EQ(tables.size(), 2U);
  EXPECT_EQ(tables[0].name, "t0");
  EXPECT_EQ(tables[0].state_nbytes_per_row, 4U);
  EXPECT_EQ(tables[1].name, "t1");  // only rank 1 has it
}

TEST(CheckpointTablesTest, RenamesApplyToTheTablesOfRanks) {
  CheckpointContents contents;
  add(contents, "embedding_bags.t0.weight", {10, 4});
  add(contents, "per_rank.1.embedding_bags.t0.weight", {10, 4});
  for (const TableName& name :
       table_names(contents, {{"embedding_bags.t0.", "embedding_bags.t1."}})) {
    EXPECT_EQ(name.table, "t1") << name.fqn;
  }
}

}  // namespace
}  // namespace tessera::reshard
