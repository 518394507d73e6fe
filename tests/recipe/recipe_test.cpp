#include "tessera/recipe/recipe.h"

#include <gmock/gmock.h>

#include <cstring>
#include <numeric>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "support/error_matchers.h"
#include "support/memory_checkpoint.h"
#include "support/reading.h"
#include "tessera/base/error.h"

namespace tessera::recipe {
namespace {

using formats::CheckpointReader;
using formats::StateKind;
using test::Bytes;
using test::bytes_of;
using test::floats;
using test::MemoryCheckpoint;
using testing::Contains;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

/// Numbers from `first` on.
Bytes numbers(std::int64_t numel, float first = 0) {
  std::vector<float> values(static_cast<std::size_t>(numel));
  std::iota(values.begin(), values.end(), first);
  return bytes_of(values);
}

Recipe parsed(const std::string& rules, const std::string& more = "") {
  return Recipe::parse("{\"schema\": 1, " + more + "\"rules\": [" + rules + "]}", "r.json");
}

std::unique_ptr<CheckpointReader> applied(MemoryCheckpoint source, const Recipe& recipe,
                                          RecipeOptions options = {}) {
  return open_transformed(std::make_unique<MemoryCheckpoint>(std::move(source)), recipe, options);
}

std::vector<std::string> names(const CheckpointReader& reader) {
  std::vector<std::string> all;
  for (const auto& tensor : reader.contents().tensors) {
    all.push_back(tensor.meta.fqn + " " + shape_to_string(tensor.meta.shape));
  }
  return all;
}

std::vector<std::string> notes_of(const CheckpointReader& reader) {
  std::vector<std::string> notes;
  for (const formats::Finding& finding : reader.contents().opening_findings) {
    notes.push_back(finding.found);
  }
  return notes;
}

std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(RecipeTest, RenamesWithCaptures) {
  MemoryCheckpoint source;
  source.add({"h.0.w", DType::float32, {2}}, numbers(2));
  source.add({"h.11.w", DType::float32, {2}}, numbers(2, 10));
  const auto reader =
      applied(source, parsed(R"({"from": "h.{L}.w", "to": "layers.{L+1}.weight"})"));
  EXPECT_THAT(names(*reader), ElementsAre("layers.1.weight [2]", "layers.12.weight [2]"));
  EXPECT_THAT(floats(*reader, "layers.12.weight"), ElementsAre(10, 11));
}

TEST(RecipeTest, NumbersOfNamesAreNotNegative) {
  MemoryCheckpoint source;
  source.add({"h.0", DType::float32, {2}}, numbers(2));
  source.add_value("v.0", 1);
  for (const char* const rule :
       {R"({"from": "h.{L}", "to": "g.{L-1}"})", R"({"from": "v.{L}", "to": "g.{L-1}"})",
        R"({"from": "h.0", "to": "g.{L-1}", "ops": [{"unstack": "L"}]})"}) {
    EXPECT_THAT(
        message_of([&] { applied(source, parsed(rule, R"("rest": "keep", )")); }),
        HasSubstr("rule 1, g.{L-1}: expected numbers of 0 or more, found a negative number"))
        << rule;
  }
}

// As in models whose last layers predict further tokens (MTP): another framework names them apart.
TEST(RecipeTest, ARangeOfNumbersHasARuleOfItsOwn) {
  MemoryCheckpoint source;
  for (const char* layer : {"0", "1", "2"}) {
    source.add({std::string("h.") + layer + ".w", DType::float32, {1}}, numbers(1));
  }
  const Recipe recipe = parsed(R"({"from": "h.{L:0..layers}.w", "to": "main.{L}.w"},
                {"from": "h.{M+layers}.w", "to": "more.{M}.w"})",
                               R"("variables": {"layers": {"config": "num_hidden_layers"}}, )");
  const RecipeOptions options{.config = Value::Dict{{"num_hidden_layers", 2}}};
  EXPECT_THAT(names(*applied(source, recipe, options)),
              ElementsAre("main.0.w [1]", "main.1.w [1]", "more.0.w [1]"));
  EXPECT_TRUE(check_recipe(recipe, source.contents(), options).is_invertible);
  EXPECT_THAT(
      message_of([&] { parsed(R"({"from": "h.{L:0..2}.w", "to": "a.{L:0..3}.w"})"); }),
      HasSubstr("{L} of one kind in all names, with the same number of words and the same range"));
}

TEST(RecipeTest, ConcatenatesAndSplits) {
  MemoryCheckpoint source;
  source.add({"q", DType::float32, {2, 2}}, numbers(4));
  source.add({"k", DType::float32, {1, 2}}, numbers(2, 10));
  const auto reader = applied(
      source,
      parsed(R"({"from": ["q", "k"], "to": "qk", "ops": [{"concat": {"sizes": [2, 1]}}]})"));
  EXPECT_THAT(floats(*reader, "qk"), ElementsAre(0, 1, 2, 3, 10, 11));

  MemoryCheckpoint columns;
  columns.add({"ab", DType::float32, {2, 4}}, numbers(8));
  const auto split = applied(
      columns,
      parsed(
          R"({"from": "ab", "to": ["a", "b"], "ops": [{"split": {"dim": -1, "sizes": [1, 3]}}]})"));
  EXPECT_THAT(floats(*split, "a"), ElementsAre(0, 4));
  EXPECT_THAT(floats(*split, "b"), ElementsAre(1, 2, 3, 5, 6, 7));
}

// Two groups: of each, the two heads of Q, then K, then V, as Megatron stores them.
TEST(RecipeTest, GroupsHeadsAsGroupedQueryAttentionDoes) {
  MemoryCheckpoint source;
  source.add({"q", DType::float32, {4, 1}}, numbers(4));
  source.add({"k", DType::float32, {2, 1}}, numbers(2, 10));
  source.add({"v", DType::float32, {2, 1}}, numbers(2, 20));
  const auto reader = applied(source, parsed(R"({"from": "{p:q|k|v}", "to": "qkv",
      "ops": [{"concat_grouped": {"groups": 2, "sizes": [4, 2, 2]}}]})"));
  EXPECT_THAT(floats(*reader, "qkv"), ElementsAre(0, 1, 10, 20, 2, 3, 11, 21));
}

TEST(RecipeTest, StacksOverCaptures) {
  MemoryCheckpoint source;
  for (const int layer : {0, 1}) {
    for (const int expert : {0, 1, 2}) {
      source.add(
          {"l." + std::to_string(layer) + ".e." + std::to_string(expert), DType::float32, {1}},
          numbers(1, static_cast<float>(10 * layer + expert)));
    }
  }
  const auto reader = applied(
      source,
      parsed(R"({"from": "l.{L}.e.{E}", "to": "all", "ops": [{"stack": "E"}, {"stack": "L"}]})"));
  EXPECT_THAT(names(*reader), ElementsAre("all [2, 3, 1]"));
  EXPECT_THAT(floats(*reader, "all"), ElementsAre(0, 1, 2, 10, 11, 12));
  const auto by_layer =
      applied(source, parsed(R"({"from": "l.{L}.e.{E}", "to": "l.{L}", "ops": [{"stack": "E"}]})"));
  EXPECT_THAT(floats(*by_layer, "l.1"), ElementsAre(10, 11, 12));
}

TEST(RecipeTest, RearrangesElements) {
  MemoryCheckpoint source;
  source.add({"w", DType::float32, {2, 3}}, numbers(6));
  const auto ops = [&](const std::string& list) {
    return floats(*applied(source, parsed(R"({"from": "w", "to": "v", "ops": [)" + list + "]}")),
                  "v");
  };
  EXPECT_THAT(ops(R"({"transpose": [0, 1]})"), ElementsAre(0, 3, 1, 4, 2, 5));
  EXPECT_THAT(ops(R"({"permute": [1, 0]}, {"reshape": {"from": [3, 2], "to": [-1]}})"),
              ElementsAre(0, 3, 1, 4, 2, 5));
  EXPECT_THAT(ops(R"({"slice": {"dim": 1, "begin": 1, "end": 3}})"), ElementsAre(1, 2, 4, 5));
  EXPECT_THAT(ops(R"({"pad": {"dim": 1, "from": 3, "to": 4, "value": 7}})"),
              ElementsAre(0, 1, 2, 7, 3, 4, 5, 7));
  EXPECT_THAT(
      ops(R"({"unflatten": {"dim": 1, "sizes": [3, 1]}}, {"flatten": {"dim": 0, "sizes": [2, 3]}})"),
      ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(ops(R"({"add": 1})"), ElementsAre(1, 2, 3, 4, 5, 6));
}

TEST(RecipeTest, DuplicatesAndMergesEqualTensors) {
  MemoryCheckpoint source;
  source.add({"w", DType::float32, {2}}, numbers(2));
  const Recipe recipe = parsed(R"({"from": "w", "to": ["a", "b"], "ops": [{"duplicate": 2}]})");
  auto reader = applied(source, recipe);
  EXPECT_THAT(floats(*reader, "b"), ElementsAre(0, 1));
  const auto back = open_transformed(std::move(reader), recipe, {.direction = Direction::inverse});
  EXPECT_THAT(floats(*back, "w"), ElementsAre(0, 1));

  MemoryCheckpoint unequal;
  unequal.add({"a", DType::float32, {2}}, numbers(2));
  unequal.add({"b", DType::float32, {2}}, numbers(2, 1));
  const auto merged = applied(unequal, recipe, {.direction = Direction::inverse});
  EXPECT_THAT(message_of([&] { floats(*merged, "w"); }),
              HasSubstr("w: rule 1: expected equal elements in the tensors that become one, found "
                        "a different element at position 0 of 2"));
}

TEST(RecipeTest, PaddingMustHaveTheValueOnTheWayBack) {
  const Recipe recipe =
      parsed(R"({"from": "w", "to": "v", "ops": [{"pad": {"from": 2, "to": 4, "value": 0}}]})");
  MemoryCheckpoint source;
  source.add({"v", DType::float32, {4}}, bytes_of<float>({1, 2, 0, 3}));
  const auto reader = applied(source, recipe, {.direction = Direction::inverse});
  EXPECT_THAT(message_of([&] { floats(*reader, "w"); }),
              HasSubstr("rule 1: expected the recipe's padding value in all elements that are left "
                        "out, found a different element at position 1 of 2"));
  const Recipe any =
      parsed(R"({"from": "w", "to": "v", "ops": [{"pad": {"from": 2, "to": 4, "value": "any"}}]})");
  EXPECT_THAT(floats(*applied(source, any, {.direction = Direction::inverse}), "w"),
              ElementsAre(1, 2));
}

TEST(RecipeTest, EachTargetOfARuleComparesWhatTheRuleMerges) {
  MemoryCheckpoint source;
  source.add({"a", DType::float32, {4}}, numbers(4));
  source.add({"b", DType::float32, {4}}, numbers(4, 1));
  const auto reader = applied(source, parsed(R"({"from": ["a", "b"], "to": ["x", "y"],
      "ops": [{"merge_equal": 2}, {"split": {"dim": 0, "sizes": [2, 2]}}]})"));
  for (const char* target : {"x", "y"}) {
    EXPECT_THAT(message_of([&] { floats(*reader, target); }),
                HasSubstr("expected equal elements in the tensors that become one"));
  }
}

MemoryCheckpoint with_adam(const std::vector<float>& steps) {
  MemoryCheckpoint source;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    const std::string name(1, static_cast<char>('a' + i));
    const auto first = static_cast<float>(100 * i);
    source.add({"model." + name, DType::float32, {2}}, numbers(2, first));
    source.add({"optim.state." + name + ".exp_avg", DType::float32, {2}}, numbers(2, first + 10));
    source.add({"optim.state." + name + ".step", DType::float32, {}}, bytes_of<float>({steps[i]}));
  }
  return source;
}

RecipeOptions with_prefix() {
  RecipeOptions options;
  add_setting(options, "prefix=model.");
  return options;
}

TEST(RecipeTest, OptimizerStateFollowsItsParameter) {
  const Recipe recipe =
      parsed(R"({"from": ["a", "b"], "to": "ab", "ops": [{"concat": 0}, {"add": 1}]})");
  const auto reader = applied(with_adam({7, 7}), recipe, with_prefix());
  EXPECT_THAT(names(*reader),
              ElementsAre("model.ab [4]", "optim.state.ab.exp_avg [4]", "optim.state.ab.step []"));
  EXPECT_THAT(floats(*reader, "model.ab"), ElementsAre(1, 2, 101, 102));
  EXPECT_THAT(floats(*reader, "optim.state.ab.exp_avg"), ElementsAre(10, 11, 110, 111));
  EXPECT_THAT(floats(*reader, "optim.state.ab.step"), ElementsAre(7));
  const auto* state = reader->contents().find_tensor("optim.state.ab.exp_avg");
  EXPECT_EQ(state->kind, StateKind::pointwise);
  EXPECT_EQ(state->parameter, "model.ab");
}

// TransformerEngine's optimizers call the copy in fp32 `master_param`.
TEST(RecipeTest, ACopyOfTheParameterFollowsItsOperations) {
  MemoryCheckpoint source;
  for (const char* name : {"w", "optim.state.w.master_param", "optim.state.w.exp_avg"}) {
    source.add({name, DType::float32, {2}}, numbers(2));
  }
  const auto reader = applied(std::move(source), parsed(R"({"from": "w", "to": "v",
      "ops": [{"pad": {"from": 2, "to": 3, "value": 5}}, {"add": 1}]})"));
  EXPECT_THAT(floats(*reader, "v"), ElementsAre(1, 2, 6));
  EXPECT_THAT(floats(*reader, "optim.state.v.master_param"), ElementsAre(1, 2, 6));
  EXPECT_THAT(floats(*reader, "optim.state.v.exp_avg"), ElementsAre(0, 1, 0));
}

// The name of the state (exp_avg) comes before the parameter's name, as in Megatron's torch_dist.
TEST(RecipeTest, StateWithItsNameFirstFollowsItsParameter) {
  MemoryCheckpoint source;
  for (const char* name : {"decoder.a", "decoder.b"}) {
    const float first = name[8] == 'a' ? 0 : 100;
    source.add({name, DType::float32, {2}}, numbers(2, first));
    for (const char* state : {"exp_avg", "fp32_param"}) {
      source.add({std::string("optimizer.state.") + state + "." + name, DType::float32, {2}},
                 numbers(2, first + 10));
    }
  }
  source.add_value("optimizer.state.step.decoder.a", 7);
  source.add_value("optimizer.state.step.decoder.b", 7);
  const Recipe recipe = parsed(
      R"({"from": ["decoder.a", "decoder.b"], "to": "model.ab", "ops": [{"concat": 0}, {"add": 1}]})");
  const auto reader = applied(source, recipe);
  EXPECT_THAT(names(*reader), ElementsAre("model.ab [4]", "optimizer.state.exp_avg.model.ab [4]",
                                          "optimizer.state.fp32_param.model.ab [4]"));
  EXPECT_THAT(floats(*reader, "optimizer.state.exp_avg.model.ab"), ElementsAre(10, 11, 110, 111));
  // The recipe's `add` changes fp32_param like the weights, because it is a copy of them.
  EXPECT_THAT(floats(*reader, "optimizer.state.fp32_param.model.ab"),
              ElementsAre(11, 12, 111, 112));
  EXPECT_EQ(reader->contents().find_tensor("optimizer.state.exp_avg.model.ab")->parameter,
            "model.ab");
  ASSERT_EQ(reader->contents().values.size(), 1U);
  EXPECT_EQ(reader->contents().values[0].name, "optimizer.state.step.model.ab");
  const auto back = open_transformed(
      applied(source, parsed(R"({"from": "decoder.{p}", "to": "m.{p}"})")),
      parsed(R"({"from": "decoder.{p}", "to": "m.{p}"})"), {.direction = Direction::inverse});
  EXPECT_THAT(names(*back), Contains("optimizer.state.exp_avg.decoder.b [2]"));
}

// The layers of the state are stacked in one tensor, as those of its parameter.
TEST(RecipeTest, StackedStateWithItsNameFirstIsUnstacked) {
  MemoryCheckpoint source;
  source.add({"decoder.layers.w", DType::float32, {2, 2}}, numbers(4));
  source.add({"optimizer.state.exp_avg.decoder.layers.w", DType::float32, {2, 2}}, numbers(4, 10));
  const auto reader = applied(
      source,
      parsed(R"({"from": "decoder.layers.w", "to": "h.{L}.w", "ops": [{"unstack": "L"}]})"));
  EXPECT_THAT(names(*reader),
              ElementsAre("h.0.w [2]", "h.1.w [2]", "optimizer.state.exp_avg.h.0.w [2]",
                          "optimizer.state.exp_avg.h.1.w [2]"));
  EXPECT_THAT(floats(*reader, "optimizer.state.exp_avg.h.1.w"), ElementsAre(12, 13));
}

// A name like that of optimizer state is an ordinary tensor if its parameter does not exist.
TEST(RecipeTest, AStateWithoutItsParameterNeedsARule) {
  MemoryCheckpoint source;
  source.add({"optimizer.state.exp_avg.lost", DType::float32, {2}}, numbers(2));
  source.add({"a", DType::float32, {2}}, numbers(2));
  EXPECT_THAT(message_of([&] { applied(source, parsed(R"({"from": "a", "to": "b"})")); }),
              HasSubstr("optimizer.state.exp_avg.lost: rest: expected a rule for this name"));
}

TEST(RecipeTest, RefusesStateThatDisagrees) {
  const Recipe recipe = parsed(R"({"from": ["a", "b"], "to": "ab", "ops": [{"concat": 0}]})");
  const auto reader = applied(with_adam({7, 8}), recipe, with_prefix());
  EXPECT_THAT(message_of([&] { floats(*reader, "optim.state.ab.step"); }),
              HasSubstr("optim.state.ab.step: rule 1: expected equal elements"));
}

// A read of the parameter does not compare its state, and a read of the state does.
TEST(RecipeTest, StateThatIsMergedIsComparedWithItself) {
  MemoryCheckpoint source;
  for (const char* name : {"a", "b"}) {
    source.add({name, DType::float32, {2}}, numbers(2));
    source.add({std::string("optim.state.") + name + ".exp_avg", DType::float32, {2}},
               numbers(2, *name == 'a' ? 10 : 20));
  }
  const auto reader =
      applied(source, parsed(R"({"from": ["a", "b"], "to": "w", "ops": [{"merge_equal": 2}]})"));
  EXPECT_THAT(floats(*reader, "w"), ElementsAre(0, 1));
  EXPECT_THAT(message_of([&] { floats(*reader, "optim.state.w.exp_avg"); }),
              HasSubstr("optim.state.w.exp_avg: rule 1: expected equal elements"));
}

TEST(RecipeTest, RefusesStateThatSomeParametersLack) {
  MemoryCheckpoint source = with_adam({7, 7});
  source.add({"model.c", DType::float32, {2}}, numbers(2));
  const Recipe recipe = parsed(R"({"from": ["a", "b", "c"], "to": "abc", "ops": [{"concat": 0}]})");
  EXPECT_THAT(message_of([&] { applied(source, recipe, with_prefix()); }),
              HasSubstr("none for model.c"));
}

TEST(RecipeTest, RefusesRowWiseStateBelowOperations) {
  MemoryCheckpoint source;
  source.add({"t", DType::float32, {2, 3}}, numbers(6));
  auto& state = source.add({"optim.state.t.row_sum", DType::float32, {2}}, numbers(2));
  state.kind = StateKind::row_wise;
  state.parameter = "t";
  EXPECT_THAT(
      message_of([&] {
        applied(source, parsed(R"({"from": "t", "to": "u", "ops": [{"transpose": [0, 1]}]})"));
      }),
      HasSubstr(
          "optim.state.t.row_sum: rule 1: expected state with one element for each element of its "
          "parameter, found row_wise state"));
  EXPECT_THAT(names(*applied(source, parsed(R"({"from": "t", "to": "u"})"))),
              ElementsAre("optim.state.u.row_sum [2]", "u [2, 3]"));
}

// torchrec's names of state have the name of the table a second time.
TEST(RecipeTest, StateOfARenamedTableHasItsNewNameTwice) {
  MemoryCheckpoint source;
  const std::string old = "ebc.embedding_bags.a.b.weight";
  source.add({"model." + old, DType::float32, {2, 3}}, numbers(6));
  source.add({"optim.state." + old + ".a.b.iter", DType::float32, {1}}, numbers(1)).key_path = {
      "optim", "state." + old + ".a.b.iter"};
  source.add({"optim.state." + old + ".a.b.momentum1", DType::float32, {2}}, numbers(2))
      .key_path = {"optim", "state", old, "a.b.momentum1"};
  source.add_value("optim.state." + old + ".a.b.lr", 1);
  const auto moved = applied(
      source, parsed(R"({"from": "ebc.embedding_bags.a.b.weight", "to": "embeddings.zip.weight"})"),
      with_prefix());
  EXPECT_THAT(names(*moved), ElementsAre("model.embeddings.zip.weight [2, 3]",
                                         "optim.state.embeddings.zip.weight.zip.iter [1]",
                                         "optim.state.embeddings.zip.weight.zip.momentum1 [2]"));
  EXPECT_EQ(moved->contents().tensors[2].key_path,
            (formats::KeyPath{"optim", "state", "embeddings.zip.weight", "zip.momentum1"}));
  EXPECT_EQ(moved->contents().values[0].name, "optim.state.embeddings.zip.weight.zip.lr");
  const auto no_table =
      applied(source, parsed(R"({"from": "ebc.embedding_bags.a.b.weight", "to": "head.weight"})"),
              with_prefix());
  EXPECT_THAT(names(*no_table), Contains("optim.state.head.weight.a.b.momentum1 [2]"));
}

// A module `state` beside the optimizer's.
TEST(RecipeTest, StateOfAParameterInAModuleCalledStateFollowsIt) {
  MemoryCheckpoint source;
  source.add({"model.enc.state.w", DType::float32, {2}}, numbers(2));
  source.add({"optim.state.enc.state.w.exp_avg", DType::float32, {2}}, numbers(2, 10));
  source.add_value("optim.param_groups.0.params", Value::List{"enc.state.w"});
  source.add_value("optim.param_groups.enc.state.w.lr", 1);  // as PyTorch flattens groups
  source.add_value("optim.state.enc.state.w.step", 7);
  const auto moved =
      applied(source, parsed(R"({"from": "enc.state.w", "to": "enc.st.w"})"), with_prefix());
  EXPECT_THAT(names(*moved), ElementsAre("model.enc.st.w [2]", "optim.state.enc.st.w.exp_avg [2]"));
  EXPECT_EQ(moved->read_value(0), Value(Value::List{"enc.st.w"}));
  EXPECT_EQ(moved->contents().values[1].name, "optim.param_groups.enc.st.w.lr");
  EXPECT_EQ(moved->contents().values[2].name, "optim.state.enc.st.w.step");
}

// A ParameterList has such names. The optimizer numbers its groups and parameters by itself.
TEST(RecipeTest, NumbersOfGroupsAndOfStateAreNoNamesOfParameters) {
  MemoryCheckpoint source;
  source.add({"model.scales.0", DType::float32, {2}}, numbers(2));
  source.add({"model.w", DType::float32, {2}}, numbers(2));
  source.add_value("optim.param_groups.0.lr", 1);
  source.add_value("optim.state.0.step", 7);
  for (const std::string rule :
       {R"({"from": "scales.0"})", R"({"from": "scales.{L}", "to": "g.{L+1}"})"}) {
    const auto moved =
        applied(source, parsed(rule + R"(, {"from": "w", "to": "w"})"), with_prefix());
    ASSERT_EQ(moved->contents().values.size(), 2U) << rule;
    EXPECT_EQ(moved->contents().values[0].name, "optim.param_groups.0.lr");
    EXPECT_EQ(moved->contents().values[1].name, "optim.state.0.step");
  }
}

TEST(RecipeTest, RenamesParametersInGroups) {
  MemoryCheckpoint source = with_adam({7, 7});
  source.add_value("optim.param_groups.0.params", Value::List{"a", "b"});
  const Recipe recipe = parsed(R"({"from": ["a", "b"], "to": "ab", "ops": [{"concat": 0}]})");
  EXPECT_EQ(applied(source, recipe, with_prefix())->read_value(0), Value(Value::List{"ab"}));

  MemoryCheckpoint apart = with_adam({7, 7});
  apart.add_value("optim.param_groups.0.params", Value::List{"a"});
  apart.add_value("optim.param_groups.1.params", Value::List{"b"});
  EXPECT_THAT(
      message_of([&] { applied(apart, recipe, with_prefix()); }),
      HasSubstr("ab: param_groups: expected one parameter group for all parameters that become "
                "one tensor, found two groups"));
}

// The name of one parameter is the end of another's, and the other one comes first.
MemoryCheckpoint with_similar_names() {
  MemoryCheckpoint source;
  for (const char* name : {"fc", "block.fc"}) {
    const float first = name[0] == 'f' ? 0 : 100;
    source.add({std::string("model.") + name, DType::float32, {2}}, numbers(2, first));
    source.add({std::string("optim.state.") + name + ".exp_avg", DType::float32, {2}},
               numbers(2, first + 10));
    source.add_value(std::string("optim.state.") + name + ".step", static_cast<int>(first));
  }
  source.add_value("optim.param_groups.0.params", Value::List{"fc", "block.fc"});
  return source;
}

TEST(RecipeTest, AParameterWhoseNameIsTheEndOfAnotherKeepsItsState) {
  const auto moved = applied(with_similar_names(), parsed(R"({"from": "block.fc", "to": "block.lin",
      "ops": [{"add": 1}]}, {"from": "fc", "to": "fc"})"),
                             with_prefix());
  EXPECT_THAT(names(*moved),
              ElementsAre("model.block.lin [2]", "model.fc [2]",
                          "optim.state.block.lin.exp_avg [2]", "optim.state.fc.exp_avg [2]"));
  EXPECT_THAT(floats(*moved, "optim.state.fc.exp_avg"), ElementsAre(10, 11));
  EXPECT_THAT(floats(*moved, "optim.state.block.lin.exp_avg"), ElementsAre(110, 111));
  EXPECT_EQ(moved->read_value(0), Value(Value::List{"fc", "block.lin"}));
  EXPECT_EQ(moved->contents().values[1].name, "optim.state.block.lin.step");
}

// Two models with the same names, each with an optimizer.
TEST(RecipeTest, TheOptimizerOfAModelFollowsThisModel) {
  MemoryCheckpoint source;
  for (const std::string model : {"actor.", "critic."}) {
    source.add({model + "model.fc", DType::float32, {2}}, numbers(2));
    source.add({model + "optim.state.fc.exp_avg", DType::float32, {2}}, numbers(2));
    source.add_value(model + "optim.param_groups.0.params", Value::List{"fc"});
    source.add_value(model + "optim.state.fc.step", 1);
  }
  RecipeOptions options;
  add_setting(options, "prefix=critic.model.");
  const auto moved =
      applied(source, parsed(R"({"from": "fc", "to": "head"})", R"("rest": "keep", )"), options);
  EXPECT_THAT(names(*moved),
              ElementsAre("actor.model.fc [2]", "actor.optim.state.fc.exp_avg [2]",
                          "critic.model.head [2]", "critic.optim.state.head.exp_avg [2]"));
  EXPECT_EQ(moved->read_value(0), Value(Value::List{"fc"}));
  EXPECT_EQ(moved->read_value(2), Value(Value::List{"head"}));
  EXPECT_EQ(moved->contents().values[3].name, "critic.optim.state.head.step");
}

/// Tensors `<model>.fc` for each model, and for each optimizer the state of a parameter `fc`.
MemoryCheckpoint with_models(const std::vector<std::string>& models,
                             const std::vector<std::string>& optimizers = {"optim"}) {
  MemoryCheckpoint source;
  for (const std::string& model : models)
    source.add({model + ".fc", DType::float32, {2}}, numbers(2));
  for (const std::string& optimizer : optimizers) {
    source.add({optimizer + ".state.fc.exp_avg", DType::float32, {2}}, numbers(2));
    source.add_value(optimizer + ".state.fc.step", 1);
    source.add_value(optimizer + ".param_groups.0.params", Value::List{"fc"});
  }
  return source;
}

// `ema.fc` fits the optimizer's name `fc` as well as `model.fc` does.
TEST(RecipeTest, StateFollowsTheModelAndNotACopyOfIt) {
  const Recipe recipe = parsed(R"({"from": "fc", "to": "head"})", R"("rest": "keep", )");
  const auto moved = applied(with_models({"ema", "model"}), recipe, with_prefix());
  EXPECT_THAT(names(*moved),
              ElementsAre("ema.fc [2]", "model.head [2]", "optim.state.head.exp_avg [2]"));
  EXPECT_EQ(moved->contents().values[0].name, "optim.param_groups.0.params");
  EXPECT_EQ(moved->read_value(0), Value(Value::List{"head"}));
  EXPECT_EQ(moved->contents().values[1].name, "optim.state.head.step");

  const Recipe of_any = parsed(R"({"from": "{m:model|ema}.fc", "to": "{m:new|ema}.head"})");
  EXPECT_THAT(names(*applied(with_models({"ema", "model"}), of_any)),
              ElementsAre("ema.head [2]", "new.head [2]", "optim.state.new.head.exp_avg [2]"));

  RecipeOptions options;  // the prefix counts more than the name `model`
  add_setting(options, "prefix=policy.");
  EXPECT_THAT(names(*applied(with_models({"model", "policy"}), recipe, options)),
              ElementsAre("model.fc [2]", "optim.state.head.exp_avg [2]", "policy.head [2]"));
}

TEST(RecipeTest, RefusesStateOfWhichNothingTellsTheParameter) {
  const auto renaming = [](const char* name, MemoryCheckpoint source, const char* prefix) {
    RecipeOptions options;
    add_setting(options, std::string("prefix=") + prefix);
    const std::string rule = R"({"from": ")" + std::string(name) + R"(", "to": "head"})";
    const Recipe recipe = parsed(rule, R"("rest": "keep", )");
    return message_of([&] { applied(std::move(source), recipe, options); });
  };
  EXPECT_THAT(renaming("b.fc", with_models({"a", "b"}), ""),
              HasSubstr("optim.state.fc.exp_avg: state: expected one parameter that this state may "
                        "belong to, found a.fc and b.fc"));
  EXPECT_THAT(renaming("a.fc", with_models({"a", "b", "c"}), ""), HasSubstr("found a.fc and b.fc"));
  // The prefix would give one parameter the state of both optimizers.
  EXPECT_THAT(renaming("fc", with_models({"model", "disc"}, {"optim_d", "optim_g"}), "model."),
              HasSubstr(".state.fc.exp_avg: state: expected one parameter"));
  // The rule names none of the parameters.
  MemoryCheckpoint source = with_models({"a", "b"});
  source.add({"other", DType::float32, {2}}, numbers(2));
  EXPECT_EQ(renaming("other", std::move(source), ""), "no error");
}

/// A tensor `w`, a buffer, and state of a parameter 0.
MemoryCheckpoint with_numbered_state() {
  MemoryCheckpoint source;
  source.add({"buffer", DType::float32, {2}}, numbers(2));
  source.add({"optim.state.0.exp_avg", DType::float32, {2, 1}}, numbers(2)).key_path = {
      "optim", "state", std::int64_t{0}, "exp_avg"};
  source.add({"w", DType::float32, {2, 1}}, numbers(2));
  return source;
}

TEST(RecipeTest, OperationsRefuseStateUnderNumbers) {
  const auto error_of = [](const char* rule) {
    const Recipe recipe = parsed(rule, R"("rest": "keep", )");
    return message_of([&] { applied(with_numbered_state(), recipe); });
  };
  EXPECT_THAT(error_of(R"({"from": "w", "to": "w", "ops": [{"transpose": [0, 1]}]})"),
              HasSubstr("optim.state.0.exp_avg: rule 1: expected state under the names of "
                        "parameters, which can follow the operations of this rule, found state "
                        "under numbers"));
  EXPECT_EQ(error_of(R"({"from": "w", "to": "v"})"), "no error");
}

TEST(RecipeTest, StateUnderNumbersThatStaysIsNotedIfRulesDropTensors) {
  const auto notes_for = [](const char* rule) {
    return notes_of(*applied(with_numbered_state(), parsed(rule, R"("rest": "keep", )")));
  };
  EXPECT_THAT(notes_for(R"({"from": "buffer"})"),
              Contains("1 tensor (optim.state.0.exp_avg) of state under numbers, also of "
                       "parameters that are left out"));
  EXPECT_THAT(notes_for(R"({"from": "optim.state.{N}.exp_avg"})"), testing::SizeIs(1));
  EXPECT_THAT(notes_for(R"({"from": "buffer", "to": "b"})"), IsEmpty());
}

TEST(RecipeTest, AnAliasThatEndsLikeAParameterIsNotTakenForIt) {
  MemoryCheckpoint source = with_similar_names();
  source.add_alias("lm_fc", "model.fc");
  const auto moved = applied(
      source, parsed(R"({"from": "fc", "to": "head"})", R"("rest": "keep", )"), with_prefix());
  EXPECT_EQ(moved->read_value(0), Value(Value::List{"head", "block.fc"}));
}

TEST(RecipeTest, KeptParametersStayInTheirGroups) {
  const auto groups_after = [&](const char* rule) {
    const Recipe recipe = parsed(rule, R"("rest": "keep", )");
    return applied(with_similar_names(), recipe, with_prefix())->read_value(0);
  };
  EXPECT_EQ(groups_after(R"({"from": "block.fc", "to": "block.lin"})"),
            Value(Value::List{"fc", "block.lin"}));
  EXPECT_EQ(groups_after(R"({"from": "block.fc"})"), Value(Value::List{"fc"}));
}

TEST(RecipeTest, TwoOptimizersMayListOneParameterInOtherGroups) {
  MemoryCheckpoint source = with_adam({7, 7});
  source.add_value("optim.param_groups.0.params", Value::List{"a", "b"});
  source.add_value("optim2.param_groups.0.params", Value::List{"c"});
  source.add_value("optim2.param_groups.1.params", Value::List{"a", "b"});
  const Recipe recipe = parsed(R"({"from": ["a", "b"], "to": "ab", "ops": [{"concat": 0}]})");
  const auto reader = applied(source, recipe, with_prefix());
  EXPECT_EQ(reader->read_value(0), Value(Value::List{"ab"}));
  EXPECT_EQ(reader->read_value(2), Value(Value::List{"ab"}));
}

TEST(RecipeTest, WhatNoRuleNamesIsRefusedOrKept) {
  MemoryCheckpoint source;
  source.add({"a", DType::float32, {1}}, numbers(1));
  source.add({"other", DType::float32, {1}}, numbers(1));
  EXPECT_THAT(message_of([&] { applied(source, parsed(R"({"from": "a", "to": "b"})")); }),
              HasSubstr("other: rest: expected a rule for this name"));
  EXPECT_THAT(names(*applied(source, parsed(R"({"from": "a", "to": "b"})", R"("rest": "keep", )"))),
              ElementsAre("b [1]", "other [1]"));
  EXPECT_THAT(names(*applied(source, parsed(R"({"from": "a", "to": "b"}, {"from": "other"})"))),
              ElementsAre("b [1]"));
}

MemoryCheckpoint with_wrappers() {
  MemoryCheckpoint source;
  source.add({"model._orig_mod.h.0._checkpoint_wrapped_module.w", DType::float32, {2}}, numbers(2));
  source.add({"model._orig_mod.h.1.module.w", DType::float32, {2}}, numbers(2, 20));
  source.add({"optim.state.h.0._checkpoint_wrapped_module.w.exp_avg", DType::float32, {2}},
             numbers(2, 10));
  source.add({"optim.state._orig_mod.h.1.module.w.exp_avg", DType::float32, {2}}, numbers(2, 30));
  source.add_value("model._orig_mod.module.count", 3);
  source.add_value("optim.param_groups.0.params",
                   Value::List{"h.0._checkpoint_wrapped_module.w", "_orig_mod.h.1.module.w"});
  return source;
}

constexpr const char* kUnwrap =
    R"("unwrap": ["_orig_mod", "_checkpoint_wrapped_module", "module"], )";

TEST(RecipeTest, WrappersAreLeftOutOfNames) {
  const Recipe recipe = parsed("", std::string(kUnwrap) + R"("rest": "keep", )");
  const auto reader = applied(with_wrappers(), recipe);
  EXPECT_THAT(names(*reader),
              ElementsAre("model.h.0.w [2]", "model.h.1.w [2]", "optim.state.h.0.w.exp_avg [2]",
                          "optim.state.h.1.w.exp_avg [2]"));
  EXPECT_THAT(floats(*reader, "optim.state.h.1.w.exp_avg"), ElementsAre(30, 31));
  EXPECT_EQ(reader->contents().find_tensor("optim.state.h.0.w.exp_avg")->parameter, "model.h.0.w");
  EXPECT_EQ(reader->contents().values[0].name, "model.count");
  EXPECT_EQ(reader->read_value(1), Value(Value::List{"h.0.w", "h.1.w"}));

  const RecipeReport report = check_recipe(recipe, with_wrappers().contents(), {});
  EXPECT_THAT(report.problems, IsEmpty());
  EXPECT_FALSE(report.is_invertible);  // the inverse cannot put wrappers back
  ASSERT_EQ(report.notes.size(), 1U);
  EXPECT_EQ(report.notes[0].rule, "unwrap");
  EXPECT_EQ(report.notes[0].found, "4 names without the wrappers that \"unwrap\" removes");
}

TEST(RecipeTest, RulesSeeNamesWithoutWrappers) {
  const Recipe recipe = parsed(
      R"({"from": "h.{L}.w", "to": "all", "ops": [{"stack": "L"}]}, {"from": "count"})", kUnwrap);
  const auto reader = applied(with_wrappers(), recipe, with_prefix());
  EXPECT_THAT(names(*reader), ElementsAre("model.all [2, 2]", "optim.state.all.exp_avg [2, 2]"));
  EXPECT_THAT(floats(*reader, "optim.state.all.exp_avg"), ElementsAre(10, 11, 30, 31));
  EXPECT_EQ(reader->read_value(0), Value(Value::List{"all"}));
  // If the checkpoint has no wrappers, the recipe is invertible.
  MemoryCheckpoint bare;
  bare.add({"h.0.w", DType::float32, {2}}, numbers(2));
  EXPECT_TRUE(
      check_recipe(parsed(R"({"from": "h.{L}.w", "to": "all", "ops": [{"stack": "L"}]})", kUnwrap),
                   bare.contents(), {})
          .is_invertible);
}

TEST(RecipeTest, TwoNamesThatDifferByTheirWrappersAreRefused) {
  MemoryCheckpoint source;
  source.add({"a.module.w", DType::float32, {2}}, numbers(2));
  source.add({"a.w", DType::float32, {2}}, numbers(2));
  source.add({"module", DType::float32, {2}}, numbers(2));
  EXPECT_THAT(message_of([&] {
                applied(source, parsed("", std::string(kUnwrap) + R"("rest": "keep", )"));
              }),
              HasSubstr("a.w: names: expected one tensor or value of that name, found two"));
  EXPECT_THAT(message_of([&] { parsed("", R"("unwrap": ["a.b"], )"); }),
              HasSubstr("recipe, unwrap: expected names of modules without dots"));
}

TEST(RecipeTest, TiedTensorsStayTied) {
  MemoryCheckpoint source;
  source.add({"embed", DType::float32, {2}}, numbers(2));
  source.add_alias("head", "embed");
  const auto reader =
      applied(source, parsed(R"({"from": "embed", "to": "e"}, {"from": "head", "to": "h"})"));
  ASSERT_EQ(reader->contents().aliases.size(), 1U);
  EXPECT_EQ(reader->contents().aliases[0].fqn, "h");
  EXPECT_EQ(reader->contents().aliases[0].target, "e");
}

TEST(RecipeTest, ATiedTensorIsNotCutWithTheOther) {
  MemoryCheckpoint source;
  source.add({"embed", DType::float32, {4, 2}}, numbers(8));
  source.add_alias("head", "embed");
  for (const char* const operation :
       {R"({"slice": {"begin": 0, "end": 2}})", R"({"reshape": {"from": [4, 2], "to": [8]}})"}) {
    SCOPED_TRACE(operation);
    const std::string rule =
        std::string(R"({"from": "embed", "to": "embed", "ops": [)") + operation;
    const auto reader = applied(source, parsed(rule + "]}", R"("rest": "keep", )"));
    EXPECT_TRUE(reader->contents().aliases.empty());
    EXPECT_THAT(floats(*reader, "head"), ElementsAre(0, 1, 2, 3, 4, 5, 6, 7));
  }
}

TEST(RecipeTest, ValuesOfARuleWithSeveralNamesStayApart) {
  MemoryCheckpoint source;
  source.add_value("m.step", Value(1));
  source.add_value("m.epoch", Value(1));
  const auto reader =
      applied(source, parsed(R"({"from": ["m.step", "m.epoch"], "to": ["n.step", "n.epoch"]})"));
  std::vector<std::string> found;
  for (const auto& value : reader->contents().values) found.push_back(value.name);
  EXPECT_THAT(found, ElementsAre("n.epoch", "n.step"));
}

TEST(RecipeTest, ReadsSourcesInPieces) {
  MemoryCheckpoint source("memory", 2);
  const std::vector<formats::Piece> by_column = {{Box{{0, 0}, {4, 3}}, 0},
                                                 {Box{{0, 3}, {4, 3}}, 1}};
  source.add({"w", DType::float32, {4, 6}}, numbers(24), by_column);
  const std::vector<formats::Piece> flat = {{FlatRange{0, 5}, 0}, {FlatRange{5, 24}, 1}};
  source.add({"x", DType::float32, {4, 6}}, numbers(24, 100), flat);
  const auto reader = applied(
      source,
      parsed(R"({"from": "{n:w|x}", "to": "v", "ops": [{"concat": 0}, {"transpose": [0, 1]}]})"));
  const std::vector<float> found = floats(*reader, "v");
  ASSERT_EQ(found.size(), 48U);
  for (std::size_t c = 0; c < 6; ++c) {
    for (std::size_t r = 0; r < 4; ++r) {
      EXPECT_EQ(found[c * 8 + r], static_cast<float>(r * 6 + c));
      EXPECT_EQ(found[c * 8 + 4 + r], static_cast<float>(100 + r * 6 + c));
    }
  }
  std::set<int> ranks;
  for (const auto& piece : reader->contents().tensors[0].pieces) ranks.insert(piece.rank);
  EXPECT_THAT(ranks, ElementsAre(0, 1));
}

TEST(RecipeTest, TheFormIsChecked) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {R"({"from": "a", "to": "b", "op": []})", "rule 1: expected a member of from, to, ops"},
      {R"({"to": "b"})", "rule 1: expected a member \"from\""},
      {R"({"from": ["a", "b"], "to": "c"})",
       "in \"to\" one name for each tensor that remains after the operations, in total 2"},
      {R"({"from": "a.{L}", "to": "b"})", "the captures that remain after the operations: {L}"},
      {R"({"from": "a.{L}", "to": "b.{E}"})", "operations: {L}, found {E}"},
      {R"({"from": "a.{L}", "to": "b.{L}", "ops": [{"stack": "L"}]})",
       "a number capture that is only in \"from\""},
      {R"({"from": "a", "to": "b", "ops": [{"melt": 1}]})", "rule 1: expected concat, split"},
      {R"({"from": "a", "to": "b", "ops": [{"pad": {"from": "n", "to": 2}}]})",
       "a name in \"variables\", found 'n'"},
      {R"({"from": "a", "to": "b", "ops": [{"pad": {"from": "(1", "to": 2}}]})", "a ')'"},
      {R"({"from": "a", "to": "b", "ops": [{"pad": {"from": "1 2", "to": 2}}]})",
       "an operator at byte 2, or nothing more, found '1 2'"},
      {R"({"from": ["{p:q|k}.a", "{p:x|y|z}.b"], "to": "{p}", "ops": [{"concat": 0}]})",
       "{p} of one kind in all names"},
      {R"({"from": "{a}{b}", "to": "b"})", "something between '{a}'"},
      {R"({"from": "a", "to": ["b", "c"], "ops": [{"split": {"sizes": [1]}}]})",
       "in total 1, found 2"},
  };
  for (const auto& [rule, expected] : cases) {
    EXPECT_THAT(message_of([&] { parsed(rule); }), HasSubstr(expected)) << rule;
  }
}

TEST(RecipeTest, CommentsAreAllowed) {
  EXPECT_NO_THROW(
      Recipe::parse("// one\n{\"schema\": 1, /* two */ \"note\": \"// no \\\" comment\", "
                    "\"rules\": []} // end",
                    "r.json"));
}

TEST(RecipeTest, ASlashAloneIsRefused) {
  for (const char* text : {"{\"schema\": 1 / 2}", "/", "/*", "{} /", "/*/"}) {
    EXPECT_THAT([&] { Recipe::parse(text, "r.json"); },
                testing::Throws<Error>(testing::Property(&Error::kind, ErrorKind::corruption)))
        << text;
  }
}

TEST(RecipeTest, VariablesComeFromTheConfigOrTheUser) {
  const Recipe recipe = parsed(
      R"({"from": "w", "to": ["a", "b"], "ops": [{"split": {"sizes": ["n * 2", "n"]}}]})",
      R"("variables": {"n": {"config": ["text.heads", "heads"], "else": "m / 2"}, "m": {}}, )");
  MemoryCheckpoint source;
  source.add({"w", DType::float32, {6}}, numbers(6));
  const auto sizes_with = [&](RecipeOptions options) {
    return names(*applied(source, recipe, options));
  };
  EXPECT_THAT(sizes_with({.variables = {{"n", 2}}}), ElementsAre("a [4]", "b [2]"));
  EXPECT_THAT(sizes_with({.variables = {{"m", 4}}}), ElementsAre("a [4]", "b [2]"));
  EXPECT_THAT(sizes_with({.config = Value::Dict{{"heads", 2}}}), ElementsAre("a [4]", "b [2]"));
  EXPECT_THAT(message_of([&] { sizes_with({}); }), HasSubstr("variable m: expected a value"));
  EXPECT_THAT(message_of([&] {
                sizes_with({.variables = {{"m", 5}}});
              }),
              HasSubstr("a whole number as the result of 'm / 2', found 5 / 2"));
  EXPECT_THAT(message_of([&] {
                sizes_with({.variables = {{"x", 5}}});
              }),
              HasSubstr("variable: expected one of m, n, found 'x'"));
  EXPECT_THAT(message_of([&] {
                sizes_with({.variables = {{"n", 3}}});
              }),
              HasSubstr("w: rule 1, split: expected sizes that add up to 6, found [6, 3]"));
}

TEST(RecipeTest, VariablesMustNotDependOnThemselves) {
  const Recipe recipe = parsed(R"({"from": "w", "to": "v", "ops": [{"slice": {"end": "a"}}]})",
                               R"("variables": {"a": "b", "b": "a + 1"}, )");
  EXPECT_THAT(message_of([&] { applied(MemoryCheckpoint(), recipe); }), HasSubstr("found a cycle"));
}

TEST(RecipeTest, VariablesMustNotFormALongChain) {
  const auto message_for_chain_of = [](int num_variables) {
    std::string variables = "\"v0\": 1";
    for (int i = 1; i < num_variables; ++i) {
      variables += ", \"v" + std::to_string(i) + "\": \"v" + std::to_string(i - 1) + "\"";
    }
    const std::string last = "v" + std::to_string(num_variables - 1);
    const Recipe recipe =
        parsed(R"({"from": "w", "to": "v", "ops": [{"slice": {"end": ")" + last + R"("}}]})",
               "\"variables\": {" + variables + "}, ");
    return message_of([&] { applied(MemoryCheckpoint(), recipe); });
  };
  EXPECT_THAT(message_for_chain_of(33),
              HasSubstr("variable v0: expected a chain of at most 32 variables that need each "
                        "other's values, found a longer chain"));
  EXPECT_THAT(message_for_chain_of(32), testing::Not(HasSubstr("chain")));
}

TEST(RecipeTest, EachNameHasOneRuleAndOneTensor) {
  MemoryCheckpoint source;
  source.add({"a.0", DType::float32, {1}}, numbers(1));
  source.add({"a.1", DType::float32, {1}}, numbers(1));
  EXPECT_THAT(
      message_of([&] {
        applied(source, parsed(R"({"from": "a.{L}", "to": "b.{L}"}, {"from": "a.0", "to": "c"})"));
      }),
      HasSubstr(
          "a.0: rule 2: expected one rule whose \"from\" matches this name, found also rule 1"));
  EXPECT_THAT(message_of([&] {
                applied(source,
                        parsed(R"({"from": "a.0", "to": "b"}, {"from": "a.1", "to": "b"})"));
              }),
              HasSubstr("b: names: expected one tensor or value of that name, found two"));
}

TEST(RecipeTest, ARuleThatFindsNothingIsRefused) {
  MemoryCheckpoint source;
  source.add({"a", DType::float32, {1}}, numbers(1));
  EXPECT_THAT(message_of([&] {
                applied(source, parsed(R"({"from": "a", "to": "b"}, {"from": "c", "to": "d"})"));
              }),
              HasSubstr("c: rule 2: expected a tensor of that name, or \"optional\": true"));
  EXPECT_NO_THROW(applied(
      source, parsed(R"({"from": "a", "to": "b"}, {"from": "c", "to": "d", "optional": true})")));
}

TEST(RecipeTest, MissingTensorsAreNamed) {
  MemoryCheckpoint source;
  source.add({"l.0.q", DType::float32, {1}}, numbers(1));
  source.add({"l.0.k", DType::float32, {1}}, numbers(1));
  source.add({"l.1.q", DType::float32, {1}}, numbers(1));
  EXPECT_THAT(
      message_of([&] {
        applied(source,
                parsed(R"({"from": "l.{L}.{p:q|k}", "to": "l.{L}.qk", "ops": [{"concat": 0}]})"));
      }),
      HasSubstr(
          "l.1.k: rule 1: expected a tensor of this name, because there is l.1.q, found none"));
}

TEST(RecipeTest, AStackHasNoGaps) {
  MemoryCheckpoint source;
  source.add({"e.0", DType::float32, {1}}, numbers(1));
  source.add({"e.2", DType::float32, {1}}, numbers(1));
  EXPECT_THAT(
      message_of([&] {
        applied(source, parsed(R"({"from": "e.{E}", "to": "e", "ops": [{"stack": "E"}]})"));
      }),
      HasSubstr("e.0: rule 1, stack: expected {E} from 0 without a gap, found 2 in place of 1"));
}

// Check

TEST(RecipeTest, TheCheckProvesTheWayBack) {
  MemoryCheckpoint source = with_adam({7, 7});
  source.add({"model.gone", DType::float32, {3}}, numbers(3));
  const RecipeReport report = check_recipe(
      parsed(R"({"from": ["a", "b"], "to": "ab", "ops": [{"concat": 0}]}, {"from": "gone"})"),
      source.contents(), with_prefix());
  EXPECT_THAT(report.problems, IsEmpty());
  EXPECT_TRUE(report.is_invertible);
  EXPECT_THAT(report.dropped, ElementsAre("model.gone"));
  EXPECT_EQ(report.num_dropped_elements, 3U);
  EXPECT_EQ(report.num_placed_elements, 9U);
  EXPECT_EQ(report.num_equal_elements, 1U);  // the optimizer's step
  EXPECT_EQ(report.num_sources, 7U);
  EXPECT_EQ(report.num_targets, 3U);
}

TEST(RecipeTest, TheCheckFindsThatNamesDoNotComeBack) {
  MemoryCheckpoint source;
  source.add({"a.x.b.y", DType::float32, {1}}, numbers(1));
  // The inverse splits `x.y` at the first dot: {x:*} gets the shortest text.
  const RecipeReport report = check_recipe(
      parsed(R"({"from": "a.{x:*}.b.{y:*}", "to": "{x:*}.{y:*}"})"), source.contents(), {});
  EXPECT_TRUE(report.is_invertible);
  MemoryCheckpoint dotted;
  dotted.add({"a.x.z.b.y", DType::float32, {1}}, numbers(1));
  const RecipeReport wrong = check_recipe(
      parsed(R"({"from": "a.{x:*}.b.{y:*}", "to": "{x:*}.{y:*}"})"), dotted.contents(), {});
  EXPECT_FALSE(wrong.is_invertible);
  ASSERT_FALSE(wrong.problems.empty());
  EXPECT_EQ(wrong.problems[0].where.fqn, "a.x.z.b.y");
}

TEST(RecipeTest, ASliceHasNoWayBack) {
  MemoryCheckpoint source;
  source.add({"w", DType::float32, {4}}, numbers(4));
  const Recipe recipe = parsed(R"({"from": "w", "to": "v", "ops": [{"slice": {"end": 3}}]})");
  const RecipeReport report = check_recipe(recipe, source.contents(), {});
  EXPECT_THAT(report.problems, IsEmpty());
  EXPECT_FALSE(report.is_invertible);
  EXPECT_EQ(report.num_dropped_elements, 1U);
  EXPECT_THAT(message_of([&] { applied(source, recipe, {.direction = Direction::inverse}); }),
              HasSubstr("rule 1, slice: expected an operation that can be undone"));
}

TEST(RecipeTest, TheCheckNotesElementsThatNoCopyOfATensorHas) {
  MemoryCheckpoint source;
  source.add({"w", DType::float32, {4}}, numbers(4));
  const auto notes = [&](const std::string& ops) {
    std::vector<std::string> found;
    const Recipe recipe = parsed(R"({"from": "w", "to": ["u", "v"], "ops": [)" + ops + "]}");
    const RecipeReport report = check_recipe(recipe, source.contents(), {});
    EXPECT_THAT(report.problems, IsEmpty());
    for (const formats::Finding& note : report.notes) {
      if (note.rule == "dropped") found.push_back(note.where.fqn + ": " + note.found);
    }
    return found;
  };
  EXPECT_THAT(notes(R"({"duplicate": 2})"), IsEmpty());
  EXPECT_THAT(notes(R"({"duplicate": 2}, {"slice": {"end": 2}})"),
              ElementsAre("w: 2 elements; the recipe drops the others"));
  EXPECT_THAT(notes(R"({"split": {"sizes": [2, 2]}})"), IsEmpty());
}

TEST(RecipeTest, HugeSizesAreRefused) {
  MemoryCheckpoint source;
  source.add({"w", DType::float32, {4}}, numbers(4));
  for (const char* ops :
       {R"([{"pad": {"from": 4, "to": 9223372036854775807}}, {"unflatten": {"sizes": [4, -1]}}])",
        R"([{"unflatten": {"sizes": [4611686018427387904, 4]}}])",
        R"([{"unflatten": {"sizes": [-5, -1]}}])",
        R"([{"split": {"sizes": [9223372036854775807, 5]}}])",
        R"([{"slice": {"begin": -1, "end": 2}}])", R"([{"permute": [1]}])",
        R"([{"transpose": [0, 3]}])", R"([{"concat_grouped": {"groups": 0, "sizes": [4]}}])"}) {
    const std::string to =
        std::string(ops).find("split") == std::string::npos ? R"("v")" : R"(["v", "u"])";
    EXPECT_THAT(message_of([&] {
                  applied(source,
                          parsed(R"({"from": "w", "to": )" + to + R"(, "ops": )" + ops + "}"));
                }),
                HasSubstr("rule 1, "))
        << ops;
  }
}

/// A tensor that counts the bytes of its reads and keeps the largest.
class CountingSource final : public CheckpointReader {
 public:
  CountingSource() {
    contents_.tensors.push_back({.meta = {"w", DType::float32, {kRows, kColumns}},
                                 .pieces = {{whole_box(Shape{kRows, kColumns}), 0}}});
  }
  static constexpr std::int64_t kRows = 4096;
  static constexpr std::int64_t kColumns = 8192;  // 128 MiB

  formats::Format format() const override { return formats::Format::native; }
  const std::string& path() const override { return path_; }
  const formats::CheckpointContents& contents() const override { return contents_; }
  void read_piece(std::size_t, std::size_t, FlatRange range,
                  std::span<std::byte> out) const override {
    largest = std::max(largest, out.size());
    total += out.size();
    for (std::int64_t i = 0; i < range.numel(); ++i) {
      const auto value = static_cast<std::uint32_t>(range.begin + i);
      std::memcpy(out.data() + 4 * i, &value, 4);
    }
  }
  Value read_value(std::size_t) const override { return {}; }
  formats::PieceStorage piece_storage(std::size_t, std::size_t) const override { return {}; }
  void check_files(const formats::FindingSink&) const override {}
  std::vector<std::string> data_files() const override { return {}; }
  void verify(const formats::FindingSink&, const formats::ProgressSink&, int) const override {}

  mutable std::size_t largest = 0;
  mutable std::size_t total = 0;

 private:
  std::string path_ = "counting";
  formats::CheckpointContents contents_;
};

TEST(RecipeTest, ATransposedTensorIsReadInBoundedMemoryAFewTimes) {
  auto source = std::make_unique<CountingSource>();
  const CountingSource& counted = *source;
  const auto reader = open_transformed(
      std::move(source), parsed(R"({"from": "w", "to": "v", "ops": [{"transpose": [0, 1]}]})"), {});
  constexpr std::int64_t kWindow = std::int64_t{1} << 20;
  std::vector<std::uint32_t> window(static_cast<std::size_t>(kWindow));
  constexpr std::int64_t kNumel = CountingSource::kRows * CountingSource::kColumns;
  for (std::int64_t begin = 0; begin < kNumel; begin += kWindow) {
    reader->read_piece(0, 0, {begin, begin + kWindow}, std::as_writable_bytes(std::span(window)));
    for (std::int64_t i = 0; i < kWindow; i += 4099) {
      const std::int64_t column = (begin + i) / CountingSource::kRows;
      const std::int64_t row = (begin + i) % CountingSource::kRows;
      ASSERT_EQ(window[static_cast<std::size_t>(i)], row * CountingSource::kColumns + column);
    }
  }
  EXPECT_LE(counted.largest, std::size_t{4} << 20);
  EXPECT_LE(counted.total, static_cast<std::size_t>(kNumel) * 4 * 4);
}

TEST(RecipeTest, ChecksTenThousandNames) {
  MemoryCheckpoint source;
  formats::CheckpointContents& contents = source.contents_for_change();
  for (int layer = 0; layer < 100; ++layer) {
    for (int expert = 0; expert < 100; ++expert) {
      contents.tensors.push_back(
          {.meta = {"l." + std::to_string(layer) + ".e." + std::to_string(expert),
                    DType::bfloat16,
                    {64, 64}}});
    }
  }
  std::ranges::sort(contents.tensors, {}, [](const auto& each) { return each.meta.fqn; });
  const RecipeReport report = check_recipe(
      parsed(R"({"from": "l.{L}.e.{E}", "to": "l.{L}.experts", "ops": [{"stack": "E"}]})"),
      contents, {});
  EXPECT_TRUE(report.is_invertible);
  EXPECT_EQ(report.num_targets, 100U);
}

TEST(RecipeTest, WhatRulesAndSlicesDropIsNoted) {
  MemoryCheckpoint source;
  source.add({"optim.state.w.exp_avg", DType::float32, {2}}, numbers(2)).key_path = {
      "optim", "state", "w", "exp_avg"};
  source.add({"w", DType::float32, {2}}, numbers(2));
  source.add({"x", DType::float32, {6}}, numbers(6));
  source.add_alias("tied", "x");
  source.add_value("epoch", 1);
  const auto reader =
      applied(std::move(source), parsed(R"({"from": "w"}, {"from": "epoch"}, {"from": "tied"},
                {"from": "x", "to": "x", "ops": [{"slice": {"dim": 0, "begin": 1, "end": 3}}]})"));
  EXPECT_THAT(notes_of(*reader),
              ElementsAre("2 tensors (optim.state.w.exp_avg, …), 1 value (epoch), 1 alias (tied), "
                          "4 elements of slices and paddings left out by its rules"));
}

/// Tensors `a` and `b` in one flat unit, beside a unit of `c` and a tensor `d` tied to it.
MemoryCheckpoint with_units() {
  MemoryCheckpoint source;
  source.add({"a", DType::float32, {4, 2}}, numbers(8));
  source.add({"b", DType::float32, {3}}, numbers(3));
  source.add({"c", DType::float32, {2}}, numbers(2));
  source.add_alias("d", "c");
  source.contents_for_change().units = {
      make_flat_unit("u", DType::float32, {{"a", {4, 2}}, {"b", {3}}}),
      make_flat_unit("v", DType::float32, {{"d", {2}}})};
  return source;
}

TEST(RecipeTest, FlatUnitsGetTheNewNames) {
  const auto reader =
      applied(with_units(), parsed(R"({"from": "a", "to": "x"})", R"("rest": "keep", )"));
  const std::vector<FlatUnit> units = {
      make_flat_unit("u", DType::float32, {{"x", {4, 2}}, {"b", {3}}}),
      make_flat_unit("v", DType::float32, {{"d", {2}}})};
  EXPECT_EQ(reader->contents().units, units);
  EXPECT_THAT(notes_of(*reader), IsEmpty());
}

TEST(RecipeTest, FlatUnitsOfOtherShapesAreLeftOutWithANote) {
  for (const char* const rule : {
           R"({"from": "a", "to": ["x", "y"], "ops": [{"split": {"sizes": [2, 2]}}]})",
           R"({"from": "a", "to": "a", "ops": [{"transpose": [0, 1]}]})",
           R"({"from": "a", "to": ["x", "y"], "ops": [{"duplicate": 2}]})",
       }) {
    SCOPED_TRACE(rule);
    const auto reader = applied(with_units(), parsed(rule, R"("rest": "keep", )"));
    ASSERT_EQ(reader->contents().units.size(), 1);
    EXPECT_EQ(reader->contents().units[0].name, "v");
    EXPECT_THAT(notes_of(*reader), ElementsAre(HasSubstr("1 flat unit ('u')")));
  }
}

TEST(RecipeTest, AdditionsAndTiesThatRulesSplitAreNoted) {
  MemoryCheckpoint source;
  source.add({"a", DType::float32, {2}}, numbers(2));
  source.add_alias("b", "a");
  source.add_alias("c", "a");
  const auto reader =
      applied(std::move(source), parsed(R"({"from": "b", "to": "d", "ops": [{"add": 1}]},
                                   {"from": "c", "to": "e"})",
                                        R"("rest": "keep", )"));
  EXPECT_THAT(notes_of(*reader),
              ElementsAre("additions to 1 tensor (d), which round: the last bits may change",
                          "1 tensor (b) that rules turn into separate copies"));
}

TEST(RecipeTest, TiedTensorsThatOneRuleRenamesStayTied) {
  MemoryCheckpoint source;
  source.add({"a", DType::float32, {2}}, numbers(2)).key_path = {"a"};
  source.add_alias("b", "a");
  const auto reader =
      applied(std::move(source), parsed(R"({"from": ["a", "b"], "to": ["z", "y"]})"));
  EXPECT_THAT(notes_of(*reader), testing::IsEmpty());
  ASSERT_EQ(reader->contents().tensors.size(), 1U);
  EXPECT_EQ(reader->contents().tensors[0].meta.fqn, "z");
  ASSERT_EQ(reader->contents().aliases.size(), 1U);
  EXPECT_EQ(reader->contents().aliases[0].fqn, "y");
  EXPECT_EQ(reader->contents().aliases[0].target, "z");
}

TEST(RecipeTest, EachTensorThatARuleRenamesKeepsItsOwnState) {
  MemoryCheckpoint source;
  for (const std::string name : {"a", "b"}) {
    source.add({name, DType::float32, {2, 2}}, numbers(4));
    auto& state = source.add({"optim.state." + name + ".sum", DType::float32, {2}},
                             numbers(2, name == "a" ? 10 : 20));
    state.kind = formats::StateKind::row_wise;
    state.parameter = name;
  }
  const auto reader =
      applied(std::move(source), parsed(R"({"from": ["a", "b"], "to": ["z", "y"]})"));
  EXPECT_THAT(floats(*reader, "optim.state.z.sum"), ElementsAre(10, 11));
  EXPECT_THAT(floats(*reader, "optim.state.y.sum"), ElementsAre(20, 21));
}

/// One tensor with the names `a_head` and `embed`. The optimizer uses `embed`, which is the alias.
MemoryCheckpoint with_tied_embedding() {
  MemoryCheckpoint source;
  source.add({"model.a_head", DType::float32, {2, 2}}, numbers(4));
  source.add_alias("model.embed", "model.a_head");
  auto& state = source.add({"optim.state.embed.exp_avg", DType::float32, {2, 2}}, numbers(4, 10));
  state.kind = StateKind::pointwise;
  state.parameter = "model.a_head";
  source.add_value("optim.state.embed.step", 7);
  source.add_value("optim.param_groups.0.params", Value::List{"embed"});
  return source;
}

std::string state_of_embedding(const std::string& rules) {
  const auto reader =
      applied(with_tied_embedding(), parsed(rules, R"("rest": "keep", )"), with_prefix());
  std::string result;
  for (const auto& tensor : reader->contents().tensors) {
    if (tensor.kind == StateKind::plain) continue;
    result += tensor.meta.fqn + " " + shape_to_string(tensor.meta.shape) + " of " +
              tensor.parameter.str() + ", ";
  }
  for (std::size_t i = 0; i < reader->contents().values.size(); ++i) {
    result +=
        reader->contents().values[i].name + " " + value_to_string(reader->read_value(i)) + ", ";
  }
  for (const std::string& note : notes_of(*reader)) result += note;
  return result;
}

TEST(RecipeTest, StateOfATiedParameterFollowsTheNameThatItsOptimizerUses) {
  EXPECT_EQ(
      state_of_embedding(R"({"from": "embed", "to": "tok"}, {"from": "a_head", "to": "out"})"),
      "optim.state.tok.exp_avg [2, 2] of model.out, optim.param_groups.0.params ['tok'], "
      "optim.state.tok.step 7, ");
  EXPECT_EQ(state_of_embedding(R"({"from": "a_head", "to": "out"})"),
            "optim.state.embed.exp_avg [2, 2] of model.out, optim.param_groups.0.params "
            "['embed'], optim.state.embed.step 7, ");
  EXPECT_EQ(state_of_embedding(R"({"from": "a_head"})"),
            "optim.state.embed.exp_avg [2, 2] of model.embed, optim.param_groups.0.params "
            "['embed'], optim.state.embed.step 7, 1 alias (model.a_head) left out by its rules");
  EXPECT_EQ(state_of_embedding(R"({"from": "embed"})"),
            "optim.param_groups.0.params [], 1 tensor (optim.state.embed.exp_avg), 1 value "
            "(optim.state.embed.step), 1 alias (model.embed) left out by its rules");
  EXPECT_EQ(state_of_embedding(R"({"from": "embed"}, {"from": "a_head"})"),
            "optim.param_groups.0.params [], 2 tensors (model.a_head, …), 1 value "
            "(optim.state.embed.step), 1 alias (model.embed) left out by its rules");
  EXPECT_EQ(
      state_of_embedding(
          R"({"from": "embed", "to": "tok", "ops": [{"pad": {"from": 2, "to": 3, "value": 0}}]},
                   {"from": "a_head", "to": "out"})"),
      "optim.state.tok.exp_avg [3, 2] of model.tok, optim.param_groups.0.params ['tok'], "
      "optim.state.tok.step 7, 1 tensor (model.embed) that rules turn into separate copies");
}

TEST(RecipeTest, AliasesOfATensorThatIsDroppedStayTied) {
  MemoryCheckpoint source;
  source.add({"a", DType::float32, {2}}, numbers(2));
  source.add_alias("b", "a");
  source.add_alias("c", "a");
  const auto reader =
      applied(std::move(source),
              parsed(R"({"from": "a"}, {"from": "b", "to": "d"})", R"("rest": "keep", )"));
  EXPECT_THAT(names(*reader), ElementsAre("d [2]"));
  ASSERT_EQ(reader->contents().aliases.size(), 1U);
  EXPECT_EQ(reader->contents().aliases[0].fqn, "c");
}

// Optimizers may give several parameters one tensor `step`.
TEST(RecipeTest, StateThatParametersShareFollowsEachOfThem) {
  MemoryCheckpoint source;
  for (const char* name : {"a", "b"}) {
    source.add({name, DType::float32, {2}}, numbers(2));
  }
  source.add({"optim.state.a.step", DType::float32, {}}, bytes_of<float>({7}));
  source.add_alias("optim.state.b.step", "optim.state.a.step");
  for (const auto& [rules, expected, num_aliases] :
       std::vector<std::tuple<std::string, std::vector<std::string>, std::size_t>>{
           {R"({"from": "b", "to": "c"})", {"a [2]", "c [2]", "optim.state.a.step []"}, 1},
           {R"({"from": "a", "to": "c"})", {"b [2]", "c [2]", "optim.state.c.step []"}, 1},
           {R"({"from": "b"})", {"a [2]", "optim.state.a.step []"}, 0},
           {R"({"from": "a"})", {"b [2]", "optim.state.b.step []"}, 0},
           {R"({"from": ["a", "b"], "to": "ab", "ops": [{"concat": 0}]})",
            {"ab [4]", "optim.state.ab.step []"},
            0}}) {
    SCOPED_TRACE(rules);
    const auto reader = applied(source, parsed(rules, R"("rest": "keep", )"));
    EXPECT_EQ(names(*reader), expected);
    EXPECT_EQ(reader->contents().aliases.size(), num_aliases);
  }
}

// The scalar of `ab` is then an alias, whose tensor is another parameter's.
TEST(RecipeTest, ParametersOfWhichOnlyOneSharesItsStateCanBecomeOne) {
  MemoryCheckpoint source;
  for (const char* name : {"a", "b", "c"}) source.add({name, DType::float32, {2}}, numbers(2));
  source.add({"optim.state.a.step", DType::float32, {}}, bytes_of<float>({7}));
  source.add_alias("optim.state.b.step", "optim.state.a.step");
  source.add({"optim.state.c.step", DType::float32, {}}, bytes_of<float>({7}));
  const Recipe recipe =
      parsed(R"({"from": ["b", "c"], "to": "bc", "ops": [{"concat": 0}]})", R"("rest": "keep", )");
  const auto reader = applied(source, recipe);
  EXPECT_THAT(names(*reader), ElementsAre("a [2]", "bc [4]", "optim.state.a.step []"));
  EXPECT_EQ(reader->contents().aliases[0].fqn, "optim.state.bc.step");
  EXPECT_THAT(floats(*reader, "optim.state.a.step"), ElementsAre(7));
  EXPECT_THAT(check_recipe(recipe, source.contents(), {}).problems, IsEmpty());
}

TEST(RecipeTest, ATensorCannotTakeTheNameOfADict) {
  MemoryCheckpoint source;
  source.add({"a", DType::float32, {2}}, numbers(2)).key_path = {"a"};
  source.add({"d.x", DType::float32, {2}}, numbers(2)).key_path = {"d", "x"};
  const Recipe recipe = parsed(R"({"from": "a", "to": "d"})", R"("rest": "keep", )");
  const RecipeReport report = check_recipe(recipe, source.contents(), {});
  ASSERT_EQ(report.problems.size(), 1U);
  EXPECT_EQ(report.problems[0].rule, "names");
  EXPECT_THAT(
      message_of([&] { applied(std::move(source), recipe); }),
      HasSubstr("names: expected names that fit into one nested dict, found key path: expected "));
}

TEST(RecipeTest, TheCheckSaysWhatOnlyAMoveCompares) {
  MemoryCheckpoint source;
  for (const std::string name : {"a", "b"}) {
    source.add({name, DType::float32, {2}}, numbers(2));
    auto& state = source.add({"optim.state." + name + ".exp_avg", DType::float32, {2}}, numbers(2));
    state.kind = StateKind::pointwise;
    state.parameter = name;
  }
  source.add_value("optim.param_groups", Value(1));
  source.add_value("optim.state.a.note", Value(1));
  source.add_value("optim.state.b.note", Value(2));
  const auto notes_of_check = [&](const std::string& rules) {
    std::vector<std::string> found;
    const RecipeReport report = check_recipe(parsed(rules), source.contents(), {});
    EXPECT_THAT(report.problems, IsEmpty());
    for (const auto& note : report.notes) {
      if (note.rule == "values") found.push_back(note.found);
    }
    return found;
  };
  EXPECT_THAT(
      notes_of_check(R"({"from": ["a", "b"], "to": "ab", "ops": [{"concat": 0}]})"),
      ElementsAre("values that become one, such as optim.state.ab.note, and parameter groups "
                  "that become one, in optim.param_groups (only the move compares "
                  "them)"));
  EXPECT_THAT(notes_of_check(R"({"from": ["a", "b"], "to": ["x", "y"]})"), IsEmpty());
}

TEST(RecipeTest, APaddingBeyond64BitsIsAProblemOfTheCheck) {
  MemoryCheckpoint source;
  source.add({"w", DType::float32, {5}}, numbers(5));
  const RecipeReport report = check_recipe(
      parsed(
          R"({"from": "w", "to": "w", "ops": [{"pad": {"dim": 0, "from": 5, "to": 5000000000000000000}}]})"),
      source.contents(), {});
  ASSERT_EQ(report.problems.size(), 1U);
  EXPECT_EQ(report.problems[0].expected, "a tensor of fewer than 2^63 bytes");
}

TEST(RecipeTest, ATiedPairInOneTensorIsNoted) {
  MemoryCheckpoint source;
  source.add({"a", DType::float32, {2}}, numbers(2));
  source.add_alias("b", "a");
  const auto reader = applied(
      std::move(source), parsed(R"({"from": ["a", "b"], "to": "ab", "ops": [{"concat": 0}]})"));
  EXPECT_THAT(notes_of(*reader), ElementsAre("1 tensor (b) that rules turn into separate copies"));
}

TEST(RecipeTest, AdditionsThatTheDTypeCannotHoldAreRefused) {
  const Recipe plus = parsed(R"({"from": "w", "to": "v", "ops": [{"add": 1000}]})");
  const auto source = [](DType dtype, std::vector<std::uint8_t> codes) {
    MemoryCheckpoint checkpoint;
    const auto numel =
        static_cast<std::int64_t>(codes.size()) / static_cast<std::int64_t>(itemsize(dtype));
    checkpoint.add({"w", dtype, {numel}}, bytes_of<std::uint8_t>(codes));
    return checkpoint;
  };
  const auto large = applied(source(DType::float8_e4m3fn, {0x38, 0xC0}), plus);
  std::vector<std::byte> out(2);
  EXPECT_THAT(
      [&] {
        large->read_piece(0, 0, {0, 2}, out);
      },
      test::ThrowsError(ErrorKind::mismatch,
                        "w: add: expected sums up to 448.0, the largest number of float8_e4m3fn, "
                        "found 2 larger, up to 1001.0"));
  for (const DType dtype :
       {DType::float8_e4m3fnuz, DType::float8_e8m0fnu, DType::float4_e2m1fn_x2}) {
    EXPECT_THAT(
        [&] {
          applied(source(dtype, {1, 2}), plus);
        },
        test::ThrowsError(
            ErrorKind::mismatch,
            "expected a floating-point tensor of a dtype to which sums can be rounded, "
            "found " +
                std::string(dtype_name(dtype))));
  }
}

TEST(RecipeTest, OnlySumsThatAreTakenMustFit) {
  MemoryCheckpoint source;
  source.add({"w", DType::float16, {2, 2}},
             bytes_of<std::uint16_t>({0x3C00, 0x7BFF, 0x3C00, 0x7BFF}));  // 1, 65504
  const auto reader = applied(
      std::move(source),
      parsed(
          R"({"from": "w", "to": "w", "ops": [{"add": 1000}, {"slice": {"dim": 1, "begin": 0, "end": 1}}]})"));
  std::vector<std::byte> out(4);
  reader->read_piece(0, 0, {0, 2}, out);
  EXPECT_EQ(out, bytes_of<std::uint16_t>({0x63D2, 0x63D2}));  // 1001
}

TEST(RecipeTest, ADTypeWithoutZeroHasNoPaddingOfZeros) {
  MemoryCheckpoint source;
  source.add({"w", DType::float8_e8m0fnu, {2}}, bytes_of<std::uint8_t>({1, 2}));
  EXPECT_THAT(
      [&] {
        applied(
            std::move(source),
            parsed(
                R"({"from": "w", "to": "w", "ops": [{"pad": {"dim": 0, "from": 2, "to": 3}}]})"));
      },
      test::ThrowsError(ErrorKind::mismatch, "a padding value that float8_e8m0fnu can hold"));
}

/// A model of which rank 1 has its own copy of `w`, with state of its own.
MemoryCheckpoint with_own_weight() {
  MemoryCheckpoint source;
  source.add({"model.w", DType::float32, {2, 3}}, numbers(6));
  source.add({"optim.state.w.exp_avg", DType::float32, {2, 3}}, numbers(6, 10));
  source.add({"per_rank.1.model.w", DType::float32, {2, 3}}, numbers(6, 20));
  source.add({"per_rank.1.optim.state.w.exp_avg", DType::float32, {2, 3}}, numbers(6, 30));
  source.add_value("per_rank.1.optim.state.w.step", 6);
  source.add_value("optim.state.w.step", 5);
  source.add_value("optim.param_groups", Value::List{Value::Dict{{"params", Value::List{"w"}}}});
  return source;
}

TEST(RecipeTest, ARuleAppliesToTheEntriesOfEachRank) {
  const auto reader =
      applied(with_own_weight(),
              parsed(R"({"from": "model.w", "to": "model.t", "ops": [{"transpose": [0, 1]}]})"));
  EXPECT_THAT(names(*reader),
              ElementsAre("model.t [3, 2]", "optim.state.t.exp_avg [3, 2]",
                          "per_rank.1.model.t [3, 2]", "per_rank.1.optim.state.t.exp_avg [3, 2]"));
  EXPECT_THAT(floats(*reader, "model.t"), ElementsAre(0, 3, 1, 4, 2, 5));
  EXPECT_THAT(floats(*reader, "optim.state.t.exp_avg"), ElementsAre(10, 13, 11, 14, 12, 15));
  EXPECT_THAT(floats(*reader, "per_rank.1.model.t"), ElementsAre(20, 23, 21, 24, 22, 25));
  EXPECT_THAT(floats(*reader, "per_rank.1.optim.state.t.exp_avg"),
              ElementsAre(30, 33, 31, 34, 32, 35));
  std::vector<std::string> values;
  for (const auto& value : reader->contents().values) values.push_back(value.name);
  EXPECT_THAT(values, ElementsAre("optim.param_groups", "optim.state.t.step",
                                  "per_rank.1.optim.state.t.step"));
}

TEST(RecipeTest, ARuleWithoutOperationsRenamesAndDropsEntriesOfRanks) {
  MemoryCheckpoint source = with_own_weight();
  source.add({"rng", DType::float32, {1}}, numbers(1));
  source.add({"per_rank.1.rng", DType::float32, {1}}, numbers(1));
  source.add_value("seed", 1);
  source.add_value("per_rank.1.seed", 2);
  const auto reader = applied(std::move(source), parsed(R"({"from": "model.w", "to": "model.v"},
      {"from": "rng"}, {"from": "seed", "to": "s"})"));
  EXPECT_THAT(names(*reader),
              ElementsAre("model.v [2, 3]", "optim.state.v.exp_avg [2, 3]",
                          "per_rank.1.model.v [2, 3]", "per_rank.1.optim.state.v.exp_avg [2, 3]"));
  EXPECT_EQ(reader->contents().values.back().name, "s");
  EXPECT_EQ(reader->contents().values[2].name, "per_rank.1.optim.state.v.step");
  EXPECT_EQ(reader->contents().values[3].name, "per_rank.1.s");
}

TEST(RecipeTest, ARankHasTheSharedTensorsThatItHasNoOwnCopyOf) {
  MemoryCheckpoint source;
  source.add({"q", DType::float32, {2}}, numbers(2));
  source.add({"k", DType::float32, {2}}, numbers(2, 10));
  source.add({"per_rank.3.k", DType::float32, {2}}, numbers(2, 20));
  const Recipe recipe =
      parsed(R"({"from": ["q", "k"], "to": "qk", "ops": [{"concat": {"sizes": [2, 2]}}]})");
  const auto reader = applied(std::move(source), recipe);
  EXPECT_THAT(names(*reader), ElementsAre("per_rank.3.qk [4]", "qk [4]"));
  EXPECT_THAT(floats(*reader, "qk"), ElementsAre(0, 1, 10, 11));
  EXPECT_THAT(floats(*reader, "per_rank.3.qk"), ElementsAre(0, 1, 20, 21));

  MemoryCheckpoint alone;
  alone.add({"per_rank.3.k", DType::float32, {2}}, numbers(2, 20));
  EXPECT_THAT(message_of([&] { applied(std::move(alone), recipe); }),
              HasSubstr("per_rank.3.q: rule 1: expected a tensor of this name, because there is "
                        "per_rank.3.k, found none"));
}

TEST(RecipeTest, KeysThatBecomeTextAreNotedAndSimplificationsFollowTheNames) {
  using Kind = formats::Simplification::Kind;
  MemoryCheckpoint source;
  source.add({"m.1", DType::float32, {2}}, numbers(2)).key_path = {"m", *formats::dict_key(1)};
  source.add({"m.n.w", DType::float32, {2}}, numbers(2)).key_path = {"m", "n", "w"};
  source.add({"t.0", DType::float32, {2}}, numbers(2)).key_path = {"t", 0};
  source.add_value("fs", 1);
  source.contents_for_change().simplifications = {{Kind::dict_class, ""},
                                                  {Kind::dict_class, "m"},
                                                  {Kind::attributes, "m.n", {"a"}},
                                                  {Kind::tuple, "t"},
                                                  {Kind::value_type, "fs", {"frozenset"}}};
  const auto reader = applied(std::move(source), parsed(R"({"from": "{x:*}", "to": "q.{x:*}"})"));
  EXPECT_THAT(notes_of(*reader), ElementsAre("2 that become text (m.1, …)"));
  std::vector<std::string> names_of_simplified;
  for (const auto& each : reader->contents().simplifications) {
    names_of_simplified.push_back(each.name);
  }
  EXPECT_THAT(names_of_simplified, ElementsAre("", "q.m", "q.m.n.w", "q.t.0", "q.fs"));
}

}  // namespace
}  // namespace tessera::recipe
