#include "reshard/optimizer_rules.h"

#include <gmock/gmock.h>

namespace tessera::reshard {
namespace {

using formats::CheckpointContents;
using formats::StateKind;
using formats::TensorEntry;
using ::testing::ElementsAre;

CheckpointContents contents_of(std::vector<std::pair<std::string, Shape>> tensors) {
  CheckpointContents contents;
  for (auto& [fqn, shape] : tensors) {
    TensorEntry entry;
    entry.meta = {fqn, DType::float32, shape};
    entry.pieces = {{whole_box(shape), 0}};
    contents.tensors.push_back(std::move(entry));
  }
  return contents;
}

// Shows E10.
TEST(OptimizerRulesTest, NamesOfTorchDecideAndNotShapes) {
  // `mystery` has the shape of its parameter; `exp_avg` of `b` has another shape.
  const auto contents = contents_of({{"model.a", {4, 4}},
                                     {"model.b", {4}},
                                     {"optim.state.a.exp_avg", {4, 4}},
                                     {"optim.state.a.mystery", {4, 4}},
                                     {"optim.state.a.step", {}},
                                     {"optim.state.b.exp_avg", {7}}});
  const auto roles = classify_state(contents);
  EXPECT_EQ(roles[0].kind, StateKind::plain);
  EXPECT_EQ(roles[2].kind, StateKind::pointwise);
  EXPECT_EQ(roles[2].parameter_index, 0U);
  EXPECT_EQ(roles[3].kind, StateKind::opaque);
  EXPECT_EQ(roles[4].kind, StateKind::scalar_parameter);
  EXPECT_EQ(roles[5].kind, StateKind::opaque);
}

TEST(OptimizerRulesTest, TheLongestParameterNameWins) {
  const auto contents =
      contents_of({{"model.a", {2}}, {"model.a.b", {3}}, {"optim.state.a.b.exp_avg", {3}}});
  EXPECT_EQ(classify_state(contents)[2].parameter_index, 1U);
}

TEST(OptimizerRulesTest, OfEqualNamesTheOneInTheDictOfTheModelWins) {
  const auto parameter_of = [](const std::string& copy, const std::string& model) {
    const auto contents =
        contents_of({{copy + ".a", {2}}, {model + ".a", {2}}, {"optim.state.a.exp_avg", {2}}});
    return contents.tensors[*classify_state(contents)[2].parameter_index].meta.fqn;
  };
  EXPECT_EQ(parameter_of("ema", "model"), "model.a");
  EXPECT_EQ(parameter_of("ema.net", "model.net"), "model.net.a");
  EXPECT_EQ(parameter_of("a.net", "b.net"), "a.net.a");
}

TEST(OptimizerRulesTest, ACopyOfARankBelongsToTheOptimizerOfItsEntry) {
  auto contents = contents_of({{"opt.state.0.precond", {2}},
                               {"per_rank.1.opt.state.0.precond", {2}},
                               {"per_rank.1.state.0.weight", {2}}});
  contents.values.push_back({.name = "opt.param_groups"});
  contents.values.push_back({.name = "per_rank.1.opt.state.0.step"});
  EXPECT_EQ(classify_state(contents)[1].kind, StateKind::opaque);
  EXPECT_EQ(classify_state(contents)[2].kind, StateKind::plain);
  const OptimizerEntries entries(contents);
  EXPECT_TRUE(entries.contain("per_rank.1.opt.state.0.precond"));
  EXPECT_TRUE(entries.contain("per_rank.1.opt.state.0.step"));
  EXPECT_FALSE(entries.contain("per_rank.1.state.0.weight"));
}

TEST(OptimizerRulesTest, MegatronPutsTheNameOfTheStateFirst) {
  const auto contents = contents_of({{"decoder.a", {2}},
                                     {"decoder.b", {4}},
                                     {"optimizer.state.exp_avg.decoder.a", {2}},
                                     {"optimizer.state.exp_avg.decoder.b", {3}},
                                     {"optimizer.state.exp_avg.decoder.lost", {2}},
                                     {"optimizer.state.fp32_param.decoder.a", {2}},
                                     {"optimizer.state.other.decoder.a", {2}}});
  const auto roles = classify_state(contents);
  EXPECT_EQ(roles[2].kind, StateKind::pointwise);
  EXPECT_EQ(roles[2].parameter_index, 0U);
  EXPECT_EQ(roles[3].kind, StateKind::opaque) << "another shape";
  EXPECT_TRUE(roles[3].is_misnamed);
  EXPECT_FALSE(roles[4].parameter_index);
  EXPECT_EQ(roles[5].kind, StateKind::pointwise);
  EXPECT_FALSE(roles[6].parameter_index) << "no name of state";
}

TEST(OptimizerRulesTest, StateBelongsToTheParameterThatSharesMostOfItsPrefix) {
  const auto contents = contents_of({{"a.model.w", {2}},
                                     {"a.optim.state.w.exp_avg", {2}},
                                     {"b.model.w", {3}},
                                     {"b.optim.state.w.exp_avg", {3}},
                                     {"c.optim.state.w.exp_avg", {2}}});
  const auto roles = classify_state(contents);
  EXPECT_EQ(roles[1].parameter_index, 0U);
  EXPECT_EQ(roles[3].parameter_index, 2U);
  EXPECT_EQ(roles[3].kind, StateKind::pointwise);
  EXPECT_EQ(roles[4].parameter_index, 0U) << "none shares anything: the first";
}

TEST(OptimizerRulesTest, AParameterWhoseNameIsTheEndOfAnotherKeepsItsState) {
  const auto contents = contents_of({{"model.block.fc.w", {3}},
                                     {"model.fc.w", {2}},
                                     {"optim.state.block.fc.w.exp_avg", {3}},
                                     {"optim.state.fc.w.exp_avg", {2}},
                                     {"other.model.block.fc.w", {3}},
                                     {"other.model.fc.w", {2}},
                                     {"other.optim.state.fc.w.exp_avg", {2}}});
  const auto roles = classify_state(contents);
  EXPECT_EQ(roles[2].parameter_index, 0U);
  EXPECT_EQ(roles[3].parameter_index, 1U);
  EXPECT_EQ(roles[6].parameter_index, 5U);
}

// torch.compile and averages of weights.
TEST(OptimizerRulesTest, WrappersDoNotCountAsMissingComponents) {
  const auto contents = contents_of(
      {{"model._orig_mod.fc.w", {2}}, {"model_ema.fc.w", {2}}, {"optim.state.fc.w.exp_avg", {2}}});
  EXPECT_EQ(classify_state(contents)[2].parameter_index, 0U);
}

TEST(OptimizerRulesTest, StateKeyedByNumbersHasNoParameter) {
  const auto contents = contents_of({{"model.a", {2}}, {"optimizer.state.0.exp_avg", {2}}});
  const auto roles = classify_state(contents);
  EXPECT_EQ(roles[1].kind, StateKind::pointwise);
  EXPECT_EQ(roles[1].parameter_index, std::nullopt);
}

TEST(OptimizerRulesTest, ATensorOfThatNumberIsNotTheParameter) {
  const auto contents = contents_of({{"cuda_rng.0", {16}},
                                     {"model.scales.0", {2}},
                                     {"model.w", {3, 2}},
                                     {"optimizer.state.0.exp_avg", {3, 2}}});
  const auto roles = classify_state(contents);
  EXPECT_EQ(roles[3].kind, StateKind::pointwise);
  EXPECT_EQ(roles[3].parameter_index, std::nullopt);
}

// Shows D9.
TEST(OptimizerRulesTest, TorchrecsMomentumIsRowWisePointwiseOrPerShard) {
  auto contents = contents_of({{"model.embedding_bags.t.weight", {6, 8}},
                               {"optim.state.embedding_bags.t.weight.t.iter", {1}},
                               {"optim.state.embedding_bags.t.weight.t.momentum1", {6}}});
  auto roles = classify_state(contents);
  EXPECT_EQ(roles[1].kind, StateKind::scalar_table);
  EXPECT_EQ(roles[2].kind, StateKind::row_wise);
  contents.tensors[2].meta.shape = {6, 8};
  EXPECT_EQ(classify_state(contents)[2].kind, StateKind::pointwise);
  contents.tensors[0].pieces = {{Box{{0, 0}, {6, 4}}, 0}, {Box{{0, 4}, {6, 4}}, 1}};
  contents.tensors[2].meta.shape = {12};
  EXPECT_EQ(classify_state(contents)[2].kind, StateKind::row_wise_per_shard);
}

TEST(OptimizerRulesTest, TiedTablesHaveStateUnderEachOfTheirNames) {
  auto contents = contents_of({{"model.embedding_bags.t0.weight", {6, 8}},
                               {"optim.state.embedding_bags.t1.weight.t1.momentum1", {12}},
                               {"optim.state.embedding_bags.t1.weight.row_sum", {6}}});
  contents.tensors[0].pieces = {{Box{{0, 0}, {6, 4}}, 0}, {Box{{0, 4}, {6, 4}}, 1}};
  contents.aliases = {{"model.embedding_bags.t1.weight", "model.embedding_bags.t0.weight"}};
  const auto roles = classify_state(contents);
  EXPECT_EQ(roles[1].kind, StateKind::row_wise_per_shard);
  EXPECT_EQ(roles[1].parameter_index, 0U);
  EXPECT_EQ(roles[2].kind, StateKind::row_wise);
}

// Shows E10.
TEST(OptimizerRulesTest, CanonicalRowWiseStateIsKnownByItsName) {
  const auto contents = contents_of({{"model.embedding_bags.t.weight", {6, 6}},
                                     {"optim.state.embedding_bags.t.weight.row_exp_avg_sq", {6}},
                                     {"optim.state.embedding_bags.t.weight.row_sum", {12}},
                                     {"optim.state.embedding_bags.t.weight.sum", {6, 6}}});
  const auto roles = classify_state(contents);
  EXPECT_EQ(roles[1].kind, StateKind::row_wise);
  EXPECT_EQ(roles[1].parameter_index, 0U);
  EXPECT_EQ(roles[2].kind, StateKind::opaque);  // not one element per row
  EXPECT_EQ(roles[3].kind, StateKind::pointwise);
}

TEST(OptimizerRulesTest, ARecordedKindIsTakenAsItIs) {
  auto contents = contents_of({{"a", {4, 4}}, {"odd", {4, 4}}});
  contents.tensors[1].kind = StateKind::pointwise;
  contents.tensors[1].parameter = "a";
  const auto roles = classify_state(contents);
  EXPECT_EQ(roles[1].kind, StateKind::pointwise);
  EXPECT_EQ(roles[1].parameter_index, 0U);
}

/// Returns the kind of each tensor, all of them of shape [4, 2].
std::vector<StateKind> kinds_of(const std::vector<std::string>& names,
                                std::vector<std::string> values = {}) {
  std::vector<std::pair<std::string, Shape>> tensors;
  for (const std::string& name : names) tensors.emplace_back(name, Shape{4, 2});
  CheckpointContents contents = contents_of(std::move(tensors));
  for (std::string& value : values) contents.values.push_back({.name = std::move(value)});
  std::vector<StateKind> kinds;
  for (const StateRole& role : classify_state(contents)) kinds.push_back(role.kind);
  return kinds;
}

TEST(StateRootsTest, AModuleOrDictCalledStateIsNoOptimizerState) {
  constexpr auto kPlain = StateKind::plain;
  constexpr auto kPointwise = StateKind::pointwise;
  EXPECT_THAT(kinds_of({"enc.state.weight", "optim.state.enc.state.weight.exp_avg"}),
              ElementsAre(kPlain, kPointwise));
  EXPECT_THAT(kinds_of({"enc.state.weight", "state.enc.state.weight.exp_avg"}),
              ElementsAre(kPlain, kPointwise));
  EXPECT_THAT(kinds_of({"state.fc.weight", "state.fc.weight.absmax", "state.step"}),
              ElementsAre(kPlain, kPlain, kPlain));
  // The model and the optimizer in one dict `state`, as composer has them.
  EXPECT_THAT(kinds_of({"state.model.fc.weight", "state.optimizers.AdamW.state.fc.weight.sum"},
                       {"state.optimizers.AdamW.param_groups"}),
              ElementsAre(kPlain, kPointwise));
  // Another module has a parameter that ends like the name before the last component.
  EXPECT_THAT(kinds_of({"dec.fc.weight", "enc.state.fc.weight.absmax"}),
              ElementsAre(kPlain, kPlain));
}

TEST(StateRootsTest, ATableCalledStateIsNoOptimizerState) {
  auto contents = contents_of({{"ebc.embedding_bags.state.weight", {6, 8}},
                               {"state.ebc.embedding_bags.state.weight.state.momentum1", {6}}});
  const auto roles = classify_state(contents);
  EXPECT_EQ(roles[0].kind, StateKind::plain);
  EXPECT_EQ(roles[1].kind, StateKind::row_wise);
  EXPECT_EQ(roles[1].parameter_index, 0U);
}

TEST(StateRootsTest, OneNameProvesTheWholeStateOfAnOptimizer) {
  constexpr auto kPlain = StateKind::plain;
  EXPECT_THAT(
      kinds_of({"fc.w", "opt.state.fc.w.exp_avg", "opt.state.fc.w.odd", "opt.state.lost.odd"}),
      ElementsAre(kPlain, StateKind::pointwise, StateKind::opaque, StateKind::opaque));
  EXPECT_THAT(kinds_of({"opt.state.fc.w.odd"}, {"opt.param_groups.0.lr"}),
              ElementsAre(StateKind::opaque));
  EXPECT_THAT(kinds_of({"opt.state.lost.w.exp_avg"}), ElementsAre(StateKind::pointwise));
  EXPECT_THAT(kinds_of({"opt.state.0.step", "state.1.sum", "blocks.state.0.weight"}),
              ElementsAre(StateKind::scalar_parameter, StateKind::pointwise, kPlain));
  EXPECT_THAT(kinds_of({"fc.w", "opt.state.fc.w.odd"}), ElementsAre(kPlain, StateKind::opaque))
      << "the parameter's full name";
  EXPECT_THAT(kinds_of({"model.fc.w", "opt.state.exp_avg.fc.w"}),
              ElementsAre(kPlain, StateKind::pointwise));
}

/// Returns for each name the part before the `state` of the optimizer; `-` for names of no state.
std::vector<std::string> roots_of(const std::vector<std::string>& names,
                                  std::vector<std::string> values = {}) {
  CheckpointContents contents;
  for (const std::string& name : names) {
    contents.tensors.push_back({.meta = {.fqn = name, .dtype = DType::float32, .shape = {4}}});
  }
  for (std::string& value : values) contents.values.push_back({.name = std::move(value)});
  const StateRoots states(contents);
  std::vector<std::string> roots;
  for (const std::string& name : names) roots.emplace_back(states.root_of(name).value_or("-"));
  return roots;
}

TEST(StateRootsTest, ANameAloneProvesTheInnermostState) {
  EXPECT_THAT(roots_of({"state.model.fc.w", "state.opt.state.fc.w.exp_avg"}),
              ElementsAre("-", "state.opt."));
  EXPECT_THAT(roots_of({"state.model.fc.w", "state.opt.state.lost.w.exp_avg"}),
              ElementsAre("-", "state.opt."));
  EXPECT_THAT(roots_of({"state.model.fc.w", "state.opt.state.0.exp_avg"}),
              ElementsAre("-", "state.opt."));
  EXPECT_THAT(roots_of({"state.model.fc.w", "state.opt.state.exp_avg.lost.state.w"}),
              ElementsAre("-", "state.opt."))
      << "the name of the state is first";
  EXPECT_THAT(roots_of({"enc.state.w", "state.enc.state.w.exp_avg"}), ElementsAre("-", ""))
      << "a parameter proves more than the name alone";
}

TEST(StateRootsTest, NamesOfOtherOptimizersProveStateToo) {
  EXPECT_THAT(roots_of({"opt.state.0.exp_avg_sq_row"}), ElementsAre("opt."));  // Adafactor
  EXPECT_THAT(roots_of({"opt.state.0.absmax1"}), ElementsAre("opt."));         // bitsandbytes
  EXPECT_THAT(roots_of({"opt.state.0.state1"}), ElementsAre("opt."));
  EXPECT_THAT(roots_of({"model.fc.w", "opt.state.fc.w.state2"}), ElementsAre("-", "opt."));
  EXPECT_THAT(roots_of({"enc.state.cell.state1"}), ElementsAre("-")) << "a model's own buffer";
}

TEST(StateRootsTest, AValueProvesState) {
  EXPECT_THAT(roots_of({"opt.state.0.odd"}, {"opt.state.0.step"}), ElementsAre("opt."));
  EXPECT_THAT(roots_of({"model.fc.w", "opt.state.fc.w.odd"}, {"opt.state.fc.w.step"}),
              ElementsAre("-", "opt."));
  EXPECT_THAT(roots_of({"model.fc.w", "model.state.w"}, {"model.state.step"}),
              ElementsAre("-", "-"));
}

TEST(StateRootsTest, ANameOfVeryManyComponentsTakesLittleTime) {
  constexpr int kNumComponents = 100'000;  // would take hours if each `state` were tried
  std::string name;
  for (int i = 0; i < kNumComponents; ++i) name += "state.";
  EXPECT_THAT(roots_of({"fc.w", name + "w"}, {name + "step"}), ElementsAre("-", "-"));
  auto contents = contents_of({{name + "w", {4}}, {name + "w.sum", {4}}});
  contents.tensors[1].kind = StateKind::pointwise;
  contents.tensors[1].parameter = name + "v";
  EXPECT_EQ(OptimizerEntries(contents).contain(name + "w"), false);
}

TEST(StateRootsTest, ARecordedParameterProvesState) {
  auto contents = contents_of({{"fc.w", {4}}, {"opt.state.x", {4}}});
  EXPECT_FALSE(StateRoots(contents).behind_state("opt.state.y"));
  contents.tensors[1].kind = StateKind::pointwise;
  contents.tensors[1].parameter = "fc.w";
  EXPECT_EQ(StateRoots(contents).behind_state("opt.state.y"), "y");
  EXPECT_EQ(StateRoots(contents).root_of("opt.state.y"), "opt.");
}

TEST(StateRootsTest, ARecordedParameterProvesOnlyTheStateThatNamesIt) {
  auto contents = contents_of({{"state.model.fc.w", {4}}, {"state.opt.state.fc.w.exp_avg", {4}}});
  contents.tensors[1].kind = StateKind::pointwise;
  contents.tensors[1].parameter = "state.model.fc.w";
  EXPECT_FALSE(StateRoots(contents).behind_state("state.model.fc.w"));
  EXPECT_EQ(StateRoots(contents).root_of("state.opt.state.fc.w.exp_avg"), "state.opt.");
  EXPECT_FALSE(OptimizerEntries(contents).contain("state.model.fc.w"));
}

std::vector<std::string> of_optimizers(const CheckpointContents& contents) {
  const OptimizerEntries entries(contents);
  std::vector<std::string> names;
  for (const TensorEntry& tensor : contents.tensors) names.push_back(tensor.meta.fqn);
  for (const auto& value : contents.values) names.push_back(value.name);
  std::erase_if(names, [&](const std::string& name) { return !entries.contain(name); });
  return names;
}

TEST(OptimizerEntriesTest, StateAndGroupsBelongToTheOptimizer) {
  auto contents = contents_of({{"model.a", {4}},
                               {"model.b.state", {2}},
                               {"model.state.cell", {2}},
                               {"optim.state.a.exp_avg", {4}},
                               {"optim.state.a.mystery", {9}}});
  contents.values = {{"epoch", {}},
                     {"model.state.version", {}},
                     {"optim.param_groups.0.lr", {}},
                     {"optim.param_groups_of_mine", {}},
                     {"optim.state.b", {}},
                     {"optim.steps", {}}};
  EXPECT_THAT(of_optimizers(contents), ElementsAre("optim.state.a.exp_avg", "optim.state.a.mystery",
                                                   "optim.param_groups.0.lr", "optim.state.b"));
}

TEST(OptimizerEntriesTest, AnOptimizerAloneOrWithoutStateIsKnownToo) {
  auto alone = contents_of({{"state.0.momentum_buffer", {4}}});
  alone.values = {{"param_groups", {}}};
  EXPECT_THAT(of_optimizers(alone), ElementsAre("state.0.momentum_buffer", "param_groups"));

  auto without_state = contents_of({{"model.a", {4}}});
  without_state.values = {{"sgd.param_groups", {}}, {"sgd.state", {}}};
  EXPECT_THAT(of_optimizers(without_state), ElementsAre("sgd.param_groups", "sgd.state"));
}

TEST(OptimizerEntriesTest, AModuleCalledStateIsNotTheOptimizers) {
  EXPECT_THAT(
      of_optimizers(contents_of({{"enc.state.w", {4}}, {"optim.state.enc.state.w.exp_avg", {4}}})),
      ElementsAre("optim.state.enc.state.w.exp_avg"));
}

TEST(OptimizerEntriesTest, StateOfUnknownNamesBelongsToItsOptimizer) {
  auto contents = contents_of({{"model.fc.w", {4, 4}},
                               {"opt.state.fc.w.exp_avg_sq_col", {4}},
                               {"opt.state.fc.w.exp_avg_sq_row", {4}}});
  EXPECT_THAT(of_optimizers(contents),
              ElementsAre("opt.state.fc.w.exp_avg_sq_col", "opt.state.fc.w.exp_avg_sq_row"));
  contents = contents_of({{"state.model.fc.w", {4}}, {"state.opt.state.fc.w.exp_avg", {4}}});
  EXPECT_THAT(of_optimizers(contents), ElementsAre("state.opt.state.fc.w.exp_avg"));
}

// Megatron keeps the loss scale in `optimizer`, also if the state is in `optim`.
TEST(OptimizerEntriesTest, TheScaleOfTheLossBelongsToTheOptimizer) {
  auto contents = contents_of({{"grad_scaler.scale", {1}},
                               {"model.grad_scaler.scale", {1}},
                               {"optimizer.grad_scaler.scale", {1}},
                               {"optimizer.0.grad_scaler.scale", {1}},
                               {"optimizer.fp16.grad_scaler.scale", {1}},
                               {"sgd.grad_scaler.scale", {1}}});
  contents.values = {{"my_optimizer.grad_scaler.hysteresis", {}},
                     {"optimizer.grad_scaler.growth_tracker", {}},
                     {"sgd.param_groups", {}}};
  EXPECT_THAT(of_optimizers(contents),
              ElementsAre("optimizer.grad_scaler.scale", "optimizer.0.grad_scaler.scale",
                          "sgd.grad_scaler.scale", "optimizer.grad_scaler.growth_tracker",
                          "sgd.param_groups"));
}

TEST(OptimizerEntriesTest, ARecordedKindDecidesWhateverTheName) {
  auto contents = contents_of({{"a", {4}}, {"ema", {4}}, {"model.state.x", {4}}});
  contents.tensors[1].kind = StateKind::pointwise;
  contents.tensors[2].kind = StateKind::opaque;  // as the native format records what it is not told
  EXPECT_THAT(of_optimizers(contents), ElementsAre("ema"));
}

}  // namespace
}  // namespace tessera::reshard
