#include "reshard/torchrec_names.h"

#include <gmock/gmock.h>

namespace tessera::reshard {
namespace {

using formats::CheckpointContents;
using formats::KeyPath;
using formats::TensorEntry;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;

const std::string kTable = "model.ebc.embedding_bags.t.weight";
const std::string kState = "optim.state.ebc.embedding_bags.t.weight.";

/// A table of 6 rows and 8 columns on two column shards, with state under `kState`.
CheckpointContents table_with(std::vector<std::pair<std::string, Shape>> state) {
  std::ranges::sort(state);
  CheckpointContents contents;
  TensorEntry table;
  table.meta = {kTable, DType::float32, {6, 8}};
  table.pieces = {{Box{{0, 0}, {6, 4}}, 0}, {Box{{0, 4}, {6, 4}}, 1}};
  contents.tensors.push_back(std::move(table));
  for (auto& [name, shape] : state) {
    TensorEntry entry;
    entry.meta = {kState + name, DType::float32, shape};
    entry.pieces = {{whole_box(shape), 0}};
    contents.tensors.push_back(std::move(entry));
  }
  return contents;
}

/// Returns (old name, new name) of each state, without the prefix `kState`.
std::vector<std::pair<std::string, std::string>> ends(const CheckpointContents& contents,
                                                      const std::vector<StateName>& names) {
  std::vector<std::pair<std::string, std::string>> found;
  for (const StateName& name : names) {
    EXPECT_TRUE(name.fqn.starts_with(kState));
    found.emplace_back(contents.tensors[name.tensor_index].meta.fqn.substr(kState.size()),
                       name.fqn.substr(kState.size()));
  }
  return found;
}

std::vector<std::pair<std::string, std::string>> canonical(
    std::vector<std::pair<std::string, Shape>> state) {
  const CheckpointContents contents = table_with(std::move(state));
  return ends(contents, canonical_names(contents));
}

std::vector<std::pair<std::string, std::string>> torchrec(
    std::vector<std::pair<std::string, Shape>> state, const TablePlan* plan = nullptr) {
  const CheckpointContents contents = table_with(std::move(state));
  return ends(contents, torchrec_names(contents, plan).names);
}

// Shows D9.
TEST(TorchrecNamesTest, MomentumIsNamedAfterItsOptimizer) {
  EXPECT_THAT(canonical({{"t.momentum1", {6}}}), ElementsAre(Pair("t.momentum1", "row_sum")));
  EXPECT_THAT(canonical({{"t.momentum1", {12}}}), ElementsAre(Pair("t.momentum1", "row_sum")));
  EXPECT_THAT(canonical({{"t.momentum1", {6, 8}}}), ElementsAre(Pair("t.momentum1", "sum")));
  EXPECT_THAT(canonical({{"t.momentum1", {6, 8}}, {"t.exp_avg_sq", {6, 8}}}),
              ElementsAre(Pair("t.exp_avg_sq", "exp_avg_sq"), Pair("t.momentum1", "exp_avg")));
  EXPECT_THAT(canonical({{"t.momentum1", {6, 8}}, {"t.exp_avg_sq", {12}}}),
              ElementsAre(Pair("t.exp_avg_sq", "row_exp_avg_sq"), Pair("t.momentum1", "exp_avg")));
  EXPECT_THAT(canonical({{"t.momentum1", {6, 8}}, {"t.momentum2", {6}}}),
              ElementsAre(Pair("t.momentum1", "exp_avg"), Pair("t.momentum2", "row_exp_avg_sq")));
}

// Shows D9.
TEST(TorchrecNamesTest, StateOfOtherOptimizersStaysAsItIs) {
  // RMSprop by rows: its momentum1 is a decaying mean.
  EXPECT_THAT(canonical({{"t.momentum1", {6}}, {"t.prev_iter", {6}}, {"t.iter", {1}}}), IsEmpty());
  EXPECT_THAT(canonical({{"t.momentum1", {5}}}), IsEmpty());      // fits no row
  EXPECT_THAT(canonical({{"other.momentum1", {6}}}), IsEmpty());  // another table
  EXPECT_THAT(canonical({{"row_sum", {6}}, {"sum", {6, 8}}}), IsEmpty());
}

// Shows D9.
TEST(TorchrecNamesTest, TorchrecsNamesComeBack) {
  EXPECT_THAT(torchrec({{"row_sum", {6}}}), ElementsAre(Pair("row_sum", "t.momentum1")));
  EXPECT_THAT(torchrec({{"sum", {6, 8}}}), ElementsAre(Pair("sum", "t.momentum1")));
  EXPECT_THAT(torchrec({{"exp_avg", {6, 8}}, {"exp_avg_sq", {6, 8}}, {"step", {}}}),
              ElementsAre(Pair("exp_avg", "t.momentum1"), Pair("exp_avg_sq", "t.exp_avg_sq")));
  EXPECT_THAT(torchrec({{"exp_avg", {6, 8}}, {"row_exp_avg_sq", {6}}}),
              ElementsAre(Pair("exp_avg", "t.momentum1"), Pair("row_exp_avg_sq", "t.exp_avg_sq")));
  EXPECT_THAT(torchrec({{"momentum_buffer", {6, 8}}}), IsEmpty());
  EXPECT_THAT(torchrec({{"t.momentum1", {12}}}), IsEmpty());  // has it already
}

// Shows D9.
TEST(TorchrecNamesTest, TablesOfTorchOptimKeepItsNames) {
  const std::vector<std::pair<std::string, Shape>> adagrad{{"step", {}}, {"sum", {6, 8}}};
  EXPECT_THAT(torchrec(adagrad), IsEmpty());
  TablePlan plan{.world_size = 2, .tables = {{"t", {TableSharding::data_parallel, {0, 1}}}}};
  EXPECT_THAT(torchrec({{"sum", {6, 8}}}, &plan), IsEmpty());
  plan.tables["t"] = {TableSharding::row_wise, {0, 1}};
  EXPECT_THAT(torchrec(adagrad, &plan), ElementsAre(Pair("sum", "t.momentum1")));
}

TEST(TorchrecNamesTest, TiedTablesHaveTheRuleOfEitherName) {
  CheckpointContents contents = table_with({{"sum", {6, 8}}});
  contents.tensors[0].meta.fqn = "model.ebc.embedding_bags.a.weight";
  contents.aliases = {{kTable, contents.tensors[0].meta.fqn}};
  const TablePlan plan{.world_size = 2, .tables = {{"a", {TableSharding::data_parallel, {0, 1}}}}};
  EXPECT_THAT(torchrec_names(contents, nullptr).names, ::testing::SizeIs(1));
  EXPECT_THAT(torchrec_names(contents, &plan).names, IsEmpty());
}

TEST(TorchrecNamesTest, StateUnderTheAliasOfATiedTableIsNamedToo) {
  CheckpointContents contents = table_with({{"t.momentum1", {12}}});
  contents.tensors[0].meta.fqn = "model.ebc.embedding_bags.a.weight";
  contents.aliases = {{kTable, contents.tensors[0].meta.fqn}};
  EXPECT_THAT(ends(contents, canonical_names(contents)),
              ElementsAre(Pair("t.momentum1", "row_sum")));
}

TEST(TorchrecNamesTest, TheStateOfARankIsNamedLikeTheSharedState) {
  const auto names = [](const std::vector<std::pair<std::string, Shape>>& shared,
                        const std::string& of_rank, bool to_torchrec) {
    CheckpointContents contents = table_with(shared);
    TensorEntry own = *contents.find_tensor(kState + of_rank);
    own.meta.fqn = "per_rank.1." + own.meta.fqn;
    contents.tensors.push_back(std::move(own));
    const auto found =
        to_torchrec ? torchrec_names(contents, nullptr).names : canonical_names(contents);
    return found.empty() ? std::string() : found.back().fqn;
  };
  const std::string own_state = "per_rank.1." + kState;
  const std::vector<std::pair<std::string, Shape>> fused{{"t.momentum1", {6, 8}},
                                                         {"t.exp_avg_sq", {6, 8}}};
  EXPECT_EQ(names(fused, "t.momentum1", false), own_state + "exp_avg");
  EXPECT_EQ(names(fused, "t.exp_avg_sq", false), own_state + "exp_avg_sq");
  const std::vector<std::pair<std::string, Shape>> adam{{"exp_avg", {6, 8}},
                                                        {"exp_avg_sq", {6, 8}}};
  EXPECT_EQ(names(adam, "exp_avg", true), own_state + "t.momentum1");
  EXPECT_EQ(names({{"sum", {6, 8}}, {"step", {}}}, "sum", true), "");  // Adagrad of torch.optim
}

TEST(TorchrecNamesTest, OnlyTablesAreNamed) {
  const std::vector<std::pair<std::string, Shape>> adam{{"exp_avg", {8}}, {"exp_avg_sq", {8}}};
  CheckpointContents norm = table_with(adam);  // `embeddings.LayerNorm.weight` of BERT
  norm.tensors[0].meta.shape = {8};
  EXPECT_THAT(torchrec_names(norm, nullptr).names, IsEmpty());
  norm.tensors[0].meta.fqn = "another";  // the optimizer without the model
  EXPECT_THAT(torchrec_names(norm, nullptr).names, IsEmpty());
  CheckpointContents rows = table_with({{"row_sum", {6}}});
  rows.tensors[0].meta.fqn = "another";
  EXPECT_THAT(torchrec_names(rows, nullptr).names, ::testing::SizeIs(1));

  const TablePlan plan{.world_size = 2, .tables = {{"u", {TableSharding::row_wise, {0, 1}}}}};
  EXPECT_THAT(torchrec({{"exp_avg", {6, 8}}, {"exp_avg_sq", {6, 8}}}), ::testing::SizeIs(2));
  EXPECT_THAT(torchrec({{"exp_avg", {6, 8}}, {"exp_avg_sq", {6, 8}}}, &plan), IsEmpty())
      << "not a table of the plan";
}

TEST(TorchrecNamesTest, KeyPathsKeepTheirKeys) {
  CheckpointContents contents = table_with({{"t.momentum1", {6}}});
  KeyPath& path = contents.tensors[1].key_path.edit();
  const std::string parameter = "ebc.embedding_bags.t.weight";
  path = {"optim", "state", parameter, "t.momentum1"};  // a dict of dicts
  EXPECT_EQ(canonical_names(contents)[0].key_path,
            (KeyPath{"optim", "state", parameter, "row_sum"}));
  path = {"optim", "state." + parameter + ".t.momentum1"};  // one flat dict
  EXPECT_EQ(canonical_names(contents)[0].key_path,
            (KeyPath{"optim", "state." + parameter + ".row_sum"}));
  path.clear();
  EXPECT_THAT(canonical_names(contents)[0].key_path, IsEmpty());

  contents = table_with({{"row_sum", {6}}});
  contents.tensors[1].key_path = {"optim", "state", parameter, "row_sum"};
  EXPECT_EQ(torchrec_names(contents, nullptr).names[0].key_path,
            (KeyPath{"optim", "state", parameter, "t.momentum1"}));
}

TEST(TorchrecNamesTest, ANameOfTorchrecHoldsItsTableTwice) {
  EXPECT_TRUE(has_torchrec_name(kState + "t.momentum1"));
  EXPECT_TRUE(has_torchrec_name("state.embeddings.a.b.weight.a.b.iter"));  // a table `a.b`
  EXPECT_FALSE(has_torchrec_name(kState + "row_sum"));
  EXPECT_FALSE(has_torchrec_name(kState + "u.momentum1"));
  EXPECT_FALSE(has_torchrec_name(kTable));
  EXPECT_FALSE(has_torchrec_name("model.ebc.embedding_bags.t.weight.t.momentum1"));  // no state
  EXPECT_FALSE(has_torchrec_name("embedding_bags.state.weight.state.momentum1"));    // no state
  EXPECT_TRUE(has_torchrec_name("state.embedding_bags.state.weight.state.momentum1"));
}

}  // namespace
}  // namespace tessera::reshard
