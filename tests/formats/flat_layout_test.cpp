#include "formats/flat_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "support/error_matchers.h"
#include "support/memory_checkpoint.h"
#include "support/reading.h"
#include "support/temporary_directory.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

using test::Bytes;
using test::bytes_of;
using test::MemoryCheckpoint;
using test::names_of;
using test::TemporaryDirectory;
using test::ThrowsError;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

std::vector<float> counting(std::size_t numel, float from = 0) {
  std::vector<float> values(numel);
  std::iota(values.begin(), values.end(), from);
  return values;
}

/// `model.layers.0._flat_param` of 14 elements on two ranks: a [2, 3] at 0, b [4] at 8 (two are
/// skipped for alignment), two of padding.
std::vector<FlatVectorLayout> layout() {
  return {{"model.layers.0._flat_param",
           DType::float32,
           14,
           {{"model.layers.0.a", {2, 3}, 0}, {"model.layers.0.b", {4}, 8}}}};
}

MemoryCheckpoint checkpoint() {
  MemoryCheckpoint memory("flat", 2);
  memory.add({"model.layers.0._flat_param", DType::float32, {14}}, bytes_of(counting(14)),
             {{Box{{0}, {5}}, 0}, {Box{{5}, {9}}, 1}});
  memory.add({"model.scale", DType::float32, {}}, bytes_of<float>({2}));
  memory.add_value("step", 3);
  for (TensorEntry& tensor : memory.contents_for_change().tensors) {
    tensor.key_path = {"model", tensor.meta.fqn.substr(6)};
  }
  return memory;
}

std::unique_ptr<CheckpointReader> applied(MemoryCheckpoint memory,
                                          const std::vector<FlatVectorLayout>& with = layout()) {
  return apply_flat_layout(std::make_unique<MemoryCheckpoint>(std::move(memory)), with);
}

Bytes whole(const CheckpointReader& reader, std::string_view fqn) {
  const TensorEntry* tensor = reader.contents().find_tensor(fqn);
  return test::whole_tensor(reader,
                            static_cast<std::size_t>(tensor - reader.contents().tensors.data()));
}

TEST(FlatLayoutTest, ParametersAreRangesOfTheVectorsPieces) {
  const auto reader = applied(checkpoint());
  EXPECT_THAT(names_of(reader->contents()),
              ElementsAre("model.layers.0.a", "model.layers.0.b", "model.scale"));
  const TensorEntry* a = reader->contents().find_tensor("model.layers.0.a");
  ASSERT_EQ(a->pieces.size(), 2u);
  EXPECT_EQ(a->pieces[0].region, Region(FlatRange{0, 5}));
  EXPECT_EQ(a->pieces[0].rank, 0);
  EXPECT_EQ(a->pieces[1].region, Region(FlatRange{5, 6}));
  EXPECT_EQ(a->pieces[1].rank, 1);
  EXPECT_EQ(whole(*reader, "model.layers.0.a"), bytes_of(counting(6)));
  EXPECT_EQ(whole(*reader, "model.layers.0.b"), bytes_of(counting(4, 8)));
  EXPECT_EQ(whole(*reader, "model.scale"), bytes_of<float>({2}));
  EXPECT_EQ(reader->read_value(0), Value(3));
  EXPECT_EQ(reader->contents().world_size, 2);
}

/// The layout of a program that does not know the first component of the names.
std::vector<FlatVectorLayout> layout_without_first_component() {
  return {{"layers.0._flat_param",
           DType::float32,
           14,
           {{"layers.0.a", {2, 3}, 0}, {"layers.0.b", {4}, 8}}}};
}

TEST(FlatLayoutTest, ALayoutMayLackTheFirstComponent) {
  const auto reader = applied(checkpoint(), layout_without_first_component());
  EXPECT_THAT(names_of(reader->contents()),
              ElementsAre("model.layers.0.a", "model.layers.0.b", "model.scale"));
  EXPECT_EQ(whole(*reader, "model.layers.0.b"), bytes_of(counting(4, 8)));
}

TEST(FlatLayoutTest, AFirstComponentIsNotGuessed) {
  MemoryCheckpoint memory = checkpoint();
  memory.add({"ema.layers.0._flat_param", DType::float32, {14}}, bytes_of(counting(14)));
  try {
    applied(std::move(memory), layout_without_first_component());
    FAIL();
  } catch (const Error& error) {
    EXPECT_THAT(error.what(),
                HasSubstr("layers.0._flat_param: flat vector: expected a tensor of that name"));
    EXPECT_THAT(error.what(),
                HasSubstr("'ema.layers.0._flat_param', 'model.layers.0._flat_param'"));
  }
}

TEST(FlatLayoutTest, WhatAReaderFoundIsKept) {
  using Kind = Simplification::Kind;
  MemoryCheckpoint memory = checkpoint();
  memory.contents_for_change().part = PartOfWhole{.num_parts = 2};
  memory.contents_for_change().missing_files = {"r1"};
  memory.contents_for_change().simplifications = {
      {Kind::requires_grad, "model.layers.0._flat_param"}, {Kind::dict_class, ""}};
  const auto reader = applied(std::move(memory));
  EXPECT_EQ(reader->contents().part, PartOfWhole{.num_parts = 2});
  EXPECT_THAT(reader->contents().missing_files, ElementsAre("r1"));
  EXPECT_THAT(reader->contents().simplifications,
              ElementsAre(Simplification{Kind::requires_grad, "model.layers.0.a"},
                          Simplification{Kind::requires_grad, "model.layers.0.b"},
                          Simplification{Kind::dict_class, ""}));
}

TEST(FlatLayoutTest, WhatTheVectorHasLostItsParametersHave) {
  MemoryCheckpoint memory = checkpoint();
  memory.missing_data_for_change() = {.pieces = {{0, {{0, "r0"}}}}, .values = {{0, "r1"}}};
  const auto reader = applied(std::move(memory));
  ASSERT_EQ(names_of(reader->contents())[0], "model.layers.0.a");
  const MissingData missing = reader->find_missing_data();
  EXPECT_EQ(missing.pieces, (std::map<std::size_t, MissingData::Pieces>{{0, {{0, "r0"}}}}));
  EXPECT_EQ(missing.values, (std::map<std::size_t, std::string>{{0, "r1"}}));
}

TEST(FlatLayoutTest, UnitsNameTheirModuleAndParametersInOrder) {
  const auto reader = applied(checkpoint());
  const FlatUnit expected{"model.layers.0",
                          DType::float32,
                          {{"model.layers.0.a", {2, 3}, 0}, {"model.layers.0.b", {4}, 6}}};
  EXPECT_THAT(reader->contents().units, ElementsAre(expected));
}

TEST(FlatLayoutTest, ParametersLieInTheVectorsDict) {
  const auto reader = applied(checkpoint());
  EXPECT_EQ(reader->contents().find_tensor("model.layers.0.a")->key_path,
            (KeyPath{"model", "layers.0.a"}));
}

TEST(FlatLayoutTest, StateOfTheVectorIsStateOfItsParameters) {
  MemoryCheckpoint memory = checkpoint();
  memory
      .add({"optim.state.layers.0._flat_param.exp_avg", DType::float32, {14}},
           bytes_of(counting(14, 100)), {{Box{{0}, {7}}, 0}, {Box{{7}, {7}}, 1}})
      .key_path = {"optim", "state", "layers.0._flat_param", "exp_avg"};
  memory.add({"optim.state.layers.0._flat_param.step", DType::int64, {}},
             bytes_of<std::int64_t>({9}));
  const auto reader = applied(std::move(memory));
  EXPECT_THAT(names_of(reader->contents()),
              ElementsAre("model.layers.0.a", "model.layers.0.b", "model.scale",
                          "optim.state.layers.0.a.exp_avg", "optim.state.layers.0.a.step",
                          "optim.state.layers.0.b.exp_avg", "optim.state.layers.0.b.step"));
  EXPECT_EQ(whole(*reader, "optim.state.layers.0.b.exp_avg"), bytes_of(counting(4, 108)));
  EXPECT_EQ(whole(*reader, "optim.state.layers.0.b.step"), bytes_of<std::int64_t>({9}));
  EXPECT_EQ(reader->contents().find_tensor("optim.state.layers.0.a.exp_avg")->key_path,
            (KeyPath{"optim", "state", "layers.0.a", "exp_avg"}));
}

/// `actor._flat_param` and `critic._flat_param`, each of 14 elements, and state under the short
/// name that both have. `critic`: the parameters of the critic.
MemoryCheckpoint two_models() {
  MemoryCheckpoint memory("flat", 1);
  memory.add({"actor._flat_param", DType::float32, {14}}, bytes_of(counting(14)));
  memory.add({"critic._flat_param", DType::float32, {14}}, bytes_of(counting(14, 20)));
  return memory;
}
std::vector<FlatVectorLayout> layout_of_two(std::vector<FlatUnitParameter> critic) {
  return {{"actor._flat_param", DType::float32, 14, {{"actor.a", {10}, 0}, {"actor.b", {4}, 10}}},
          {"critic._flat_param", DType::float32, 14, std::move(critic)}};
}

TEST(FlatLayoutTest, ANameThatTwoVectorsShareIsRefusedUnlessTheirLayoutsAreEqual) {
  const std::vector<FlatUnitParameter> other = {{"critic.c", {14}, 0}};
  const std::vector<FlatUnitParameter> equal = {{"critic.a", {10}, 0}, {"critic.b", {4}, 10}};
  const auto with_state = [] {
    MemoryCheckpoint memory = two_models();
    memory.add({"optim_critic.state._flat_param.m", DType::float32, {14}}, bytes_of(counting(14)));
    return memory;
  };
  EXPECT_THAT([&] { applied(with_state(), layout_of_two(other)); },
              ThrowsError(ErrorKind::mismatch,
                          "optim_critic.state._flat_param.m: state of a flat vector: expected the "
                          "name of one vector, found a name of both actor._flat_param and "
                          "critic._flat_param"));
  EXPECT_THAT(names_of(applied(with_state(), layout_of_two(equal))->contents()),
              ElementsAre("actor.a", "actor.b", "critic.a", "critic.b", "optim_critic.state.a.m",
                          "optim_critic.state.b.m"));

  MemoryCheckpoint with_groups = two_models();
  with_groups.add_value("optim_critic.param_groups.0.params", Value::List{"_flat_param"});
  const auto reader = applied(std::move(with_groups), layout_of_two(other));
  EXPECT_THAT([&] { reader->read_value(0); },
              ThrowsError(ErrorKind::mismatch, "a name of both actor._flat_param and critic"));
}

TEST(FlatLayoutTest, AShortNameIsThatOfTheOutermostVectorOfAModel) {
  MemoryCheckpoint memory = checkpoint();
  memory.add({"model._flat_param", DType::float32, {14}}, bytes_of(counting(14, 50)));
  memory.add({"optim.state._flat_param.m", DType::float32, {14}}, bytes_of(counting(14)));
  std::vector<FlatVectorLayout> both = layout();
  both.push_back({"model._flat_param", DType::float32, 14, {{"model.root", {14}, 0}}});
  EXPECT_THAT(names_of(applied(std::move(memory), both)->contents()),
              ElementsAre("model.layers.0.a", "model.layers.0.b", "model.root", "model.scale",
                          "optim.state.root.m"));
}

/// Returns the names of the tensors that `state`, of 14 elements, becomes. The vector is
/// `<prefix>model._flat_param`, with parameters a [10] and b [4].
std::vector<std::string> names_of_state(const std::string& prefix, const std::string& state) {
  MemoryCheckpoint memory("flat", 1);
  const std::string model = prefix + "model.";
  memory.add({model + "_flat_param", DType::float32, {14}}, bytes_of(counting(14)));
  memory.add({state, DType::float32, {14}}, bytes_of(counting(14)));
  std::vector<std::string> names =
      names_of(applied(std::move(memory), {{model + "_flat_param",
                                            DType::float32,
                                            14,
                                            {{model + "a", {10}, 0}, {model + "b", {4}, 10}}}})
                   ->contents());
  std::erase_if(names, [&](const std::string& name) { return name.starts_with(model); });
  return names;
}

TEST(FlatLayoutTest, StateIsFoundAtAnyDepth) {
  EXPECT_THAT(names_of_state("app.", "app.optim.state._flat_param.m"),
              ElementsAre("app.optim.state.a.m", "app.optim.state.b.m"));
  EXPECT_THAT(names_of_state("state.", "state.optim.state._flat_param.m"),
              ElementsAre("state.optim.state.a.m", "state.optim.state.b.m"));
  EXPECT_THAT(names_of_state("state.", "state.optim.state.model._flat_param.m"),
              ElementsAre("state.optim.state.model.a.m", "state.optim.state.model.b.m"));
  EXPECT_THAT(names_of_state("", "optim.state._flat_param.m.q"),
              ElementsAre("optim.state.a.m.q", "optim.state.b.m.q"));
}

TEST(FlatLayoutTest, StateOfAVectorThatIsNotFoundIsRefused) {
  EXPECT_THAT([&] { names_of_state("", "optim.moments._flat_param.m"); },
              ThrowsError(ErrorKind::mismatch,
                          "optim.moments._flat_param.m: state of a flat vector: expected "
                          "`state.`, then the name of a vector in the layout, found another name"));
}

TEST(FlatLayoutTest, ValuesOfTheOptimizerNameParameters) {
  MemoryCheckpoint memory = checkpoint();
  const std::string vector = "layers.0._flat_param";
  memory.add_value("optim.param_groups.0.lr", 0.5);
  memory.add_value("optim.param_groups.0.params", Value::List{vector, "scale"}).key_path = {
      "optim", "param_groups", 0, "params"};
  memory.add_value("optim.state." + vector + ".step", 9).key_path = {"optim", "state", vector,
                                                                     "step"};
  memory.add_value("sgd.param_groups",
                   Value::List{Value::Dict{{"params", Value::List{"model." + vector}}}});
  memory.add_value("sgd.state.model." + vector, Value::Dict{});
  memory.add_value("vectors", Value::List{vector});
  std::vector<FlatVectorLayout> tied = layout();
  tied[0].parameters.push_back({"model.head", {4}, 8});
  const auto reader = applied(std::move(memory), tied);
  std::map<std::string, Value> values;
  for (std::size_t i = 0; i < reader->contents().values.size(); ++i) {
    values.emplace(reader->contents().values[i].name, reader->read_value(i));
  }
  EXPECT_THAT(
      values,
      ElementsAre(Pair("optim.param_groups.0.lr", Value(0.5)),
                  Pair("optim.param_groups.0.params",
                       Value(Value::List{"layers.0.a", "layers.0.b", "scale"})),
                  Pair("optim.state.layers.0.a.step", Value(9)),
                  Pair("optim.state.layers.0.b.step", Value(9)),
                  Pair("sgd.param_groups",
                       Value(Value::List{Value::Dict{
                           {"params", Value::List{"model.layers.0.a", "model.layers.0.b"}}}})),
                  Pair("sgd.state.model.layers.0.a", Value(Value::Dict{})),
                  Pair("sgd.state.model.layers.0.b", Value(Value::Dict{})), Pair("step", Value(3)),
                  Pair("vectors", Value(Value::List{vector}))));
  for (const ValueEntry& value : reader->contents().values) {
    if (value.name != "optim.state.layers.0.b.step") continue;
    EXPECT_EQ(value.key_path, (KeyPath{"optim", "state", "layers.0.b", "step"}));
  }
}

TEST(FlatLayoutTest, TiedParametersAreAliases) {
  std::vector<FlatVectorLayout> tied = layout();
  tied[0].parameters.push_back({"model.head", {4}, 8});
  const auto reader = applied(checkpoint(), tied);
  ASSERT_EQ(reader->contents().aliases.size(), 1u);
  EXPECT_EQ(reader->contents().aliases[0].fqn, "model.head");
  EXPECT_EQ(reader->contents().aliases[0].target, "model.layers.0.b");
}

TEST(FlatLayoutTest, RefusesLayoutsThatLeaveOutMoreThanPadding) {
  const auto message_without = [](std::size_t parameter) -> std::string {
    std::vector<FlatVectorLayout> changed = layout();
    changed[0].parameters.erase(changed[0].parameters.begin() +
                                static_cast<std::ptrdiff_t>(parameter));
    try {
      applied(checkpoint(), changed);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::mismatch);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(message_without(0), HasSubstr("flat vector: expected at most 3 elements of padding "
                                            "at 0, found 8 elements that belong to no parameter"));
  EXPECT_THAT(message_without(1), HasSubstr("at most 4 elements of padding at 6, found 8"));
}

TEST(FlatLayoutTest, RefusesWhatDoesNotAddUp) {
  const auto message_for = [](const auto& change, MemoryCheckpoint memory) -> std::string {
    std::vector<FlatVectorLayout> changed = layout();
    change(changed[0]);
    try {
      applied(std::move(memory), changed);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::mismatch);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(message_for([](auto& v) { v.numel_padded = 16; }, checkpoint()),
              HasSubstr("model.layers.0._flat_param: flat vector: expected [16], found [14]"));
  EXPECT_THAT(message_for([](auto& v) { v.dtype = DType::bfloat16; }, checkpoint()),
              HasSubstr("dtype: expected bfloat16, found float32"));
  EXPECT_THAT(
      message_for([](auto& v) { v.key = "model._flat_param"; }, checkpoint()),
      HasSubstr("model._flat_param: flat vector: expected a tensor of that name, found none"));
  EXPECT_THAT(message_for([](auto& v) { v.parameters[0].fqn = "model.scale"; }, checkpoint()),
              HasSubstr("model.scale: name: expected one tensor or value of that name, found two"));
  MemoryCheckpoint odd_state = checkpoint();
  odd_state.add({"optim.state.layers.0._flat_param.exp_avg", DType::float32, {12}},
                bytes_of(counting(12)));
  EXPECT_THAT(message_for([](auto&) {}, std::move(odd_state)),
              HasSubstr("expected shape [14] or [], found [12]"));
}

std::vector<FlatVectorLayout> read(const std::string& json) {
  const TemporaryDirectory directory;
  std::ofstream(directory / "layout.json") << json;
  return read_flat_layout(FileSystem::posix(), directory / "layout.json");
}

TEST(FlatLayoutTest, FileIsReadAsTheScriptWritesIt) {
  EXPECT_EQ(read(R"({"schema": 1, "units": [{"key": "model.layers.0._flat_param",
                     "dtype": "float32", "numel_padded": 14, "params": [
                       {"fqn": "model.layers.0.a", "shape": [2, 3], "offset": 0},
                       {"fqn": "model.layers.0.b", "shape": [4], "offset": 8}]}]})"),
            layout());
}

TEST(FlatLayoutTest, RefusesFilesThatContradictThemselves) {
  const auto message_for = [](const std::string& params) -> std::string {
    try {
      read(R"({"schema": 1, "units": [{"key": "v", "dtype": "float32", "numel_padded": 14,
               "params": [)" +
           params + "]}]}");
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::corruption);
      return error.what();
    }
    return "accepted";
  };
  EXPECT_THAT(
      message_for(R"({"fqn": "a", "shape": [4, 4], "offset": 0})"),
      HasSubstr(
          "a: place in v: expected elements within [0, 14), found shape [4, 4] from element 0"));
  EXPECT_THAT(message_for(R"({"fqn": "a", "shape": [4], "offset": -1})"), HasSubstr("place in v"));
  EXPECT_THAT(message_for(R"({"fqn": "a", "shape": [4], "offset": 9223372036854775807})"),
              HasSubstr("place in v"));
  EXPECT_THAT(message_for(R"({"fqn": "a", "shape": [4611686018427387904, 4], "offset": 0})"),
              HasSubstr("a: "));
  EXPECT_THAT(message_for(R"({"fqn": "a", "shape": [6], "offset": 0},
                             {"fqn": "b", "shape": [6], "offset": 5})"),
              HasSubstr("b: offset in v: expected at least 6, the end of a, found 5"));
  EXPECT_THAT(message_for(R"({"fqn": "a", "shape": "4", "offset": 0})"),
              HasSubstr("units[0].params[0].shape: expected list, found str"));
  EXPECT_THAT(message_for(R"({"shape": [4], "offset": 0})"),
              HasSubstr("units[0].params[0].fqn: expected a member, found none"));
}

}  // namespace
}  // namespace tessera::formats
