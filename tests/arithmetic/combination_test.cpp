#include "arithmetic/combination.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <set>
#include <tuple>
#include <utility>

#include "arithmetic/tied_embeddings.h"
#include "support/error_matchers.h"
#include "support/memory_checkpoint.h"
#include "support/memory_files.h"

namespace tessera::arithmetic {
namespace {

using formats::Finding;
using formats::MergePreference;
using formats::Piece;
using test::bytes_of;
using test::MemoryCheckpoint;
using test::ThrowsError;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::SizeIs;

struct Source {
  MemoryCheckpoint checkpoint;
  Step step{};
  std::string quantization_method{};
};

CombinedCheckpoint combined(std::vector<Source> sources, const CombineOptions& options = {},
                            std::vector<LoraAdapter> adapters = {}) {
  std::vector<WeightedReader> readers;
  for (Source& source : sources) {
    readers.push_back({std::make_unique<MemoryCheckpoint>(std::move(source.checkpoint)),
                       source.step, source.quantization_method});
  }
  return combine_checkpoints(std::move(readers), std::move(adapters), options);
}

template <class T>
std::vector<T> elements(const formats::CheckpointReader& reader, std::string_view fqn) {
  const auto index = reader.contents().find_tensor(fqn) - reader.contents().tensors.data();
  const test::Bytes bytes = test::whole_tensor(reader, static_cast<std::size_t>(index));
  std::vector<T> result(bytes.size() / sizeof(T));
  std::memcpy(result.data(), bytes.data(), bytes.size());
  return result;
}

template <class T>
MemoryCheckpoint one_tensor(const char* path, DType dtype, Shape shape, std::vector<T> numbers,
                            std::vector<Piece> pieces = {}) {
  MemoryCheckpoint checkpoint(path, 8);
  if (pieces.empty()) pieces = {{whole_box(shape), 0}};
  checkpoint.add({"w", dtype, std::move(shape)}, bytes_of<T>(numbers), pieces);
  return checkpoint;
}

std::vector<std::string> texts(const std::vector<Finding>& problems) {
  std::vector<std::string> lines;
  for (const Finding& each : problems) lines.push_back(finding_to_string(each));
  return lines;
}

std::vector<float> counting(std::size_t numel) {
  std::vector<float> numbers;
  for (std::size_t i = 0; i < numel; ++i) numbers.push_back(static_cast<float>(i) + 0.5F);
  return numbers;
}

TEST(CombinationTest, AddsUpWhateverTheShardingOfEachSource) {
  const Shape shape{4, 6};
  const std::vector<float> a = counting(24);
  const std::vector<Piece> columns{{Box{{0, 0}, {4, 2}}, 0}, {Box{{0, 2}, {4, 4}}, 1}};
  const std::vector<Piece> ranges{{FlatRange{0, 7}, 0}, {FlatRange{7, 24}, 1}};
  auto result =
      combined({{one_tensor<float>("a", DType::float32, shape, a, columns), {.weight = 2}},
                {one_tensor<float>("b", DType::float32, shape, a, ranges), {.weight = -1}},
                {one_tensor<float>("c", DType::float32, shape, a), {.weight = 0.5}}});
  EXPECT_THAT(result.problems, IsEmpty());
  EXPECT_EQ(result.reader->contents().tensors[0].pieces, columns);
  std::vector<float> expected;
  for (const float number : a) expected.push_back(1.5F * number);
  EXPECT_EQ(elements<float>(*result.reader, "w"), expected);
  EXPECT_EQ(result.reader->path(), "a + b + c");
}

TEST(CombinationTest, AWindowHasTheElementsOfTheWhole) {
  const Shape shape{4, 6};
  const std::vector<Piece> columns{
      {Box{{0, 1}, {4, 3}}, 0}, {Box{{0, 0}, {4, 1}}, 1}, {Box{{0, 4}, {4, 2}}, 2}};
  const auto result =
      combined({{one_tensor<float>("a", DType::float32, shape, counting(24), columns)},
                {one_tensor<float>("b", DType::float32, shape, counting(24))}});
  std::vector<std::byte> whole(12 * 4);
  result.reader->read_piece(0, 0, {0, 12}, whole);
  for (std::int64_t begin = 0; begin < 12; ++begin) {
    for (std::int64_t end = begin; end <= 12; ++end) {
      std::vector<std::byte> window(static_cast<std::size_t>(end - begin) * 4);
      result.reader->read_piece(0, 0, {begin, end}, window);
      EXPECT_TRUE(std::equal(window.begin(), window.end(), whole.begin() + begin * 4));
    }
  }
}

TEST(CombinationTest, RoundsOnceToTheDtypeOfTheFirstSource) {
  // 1 + 2^-8 lies between two bfloat16; 2^-40 more decides. Rounding to float32 first loses it.
  const auto a = one_tensor<float>("a", DType::float32, {1}, {1.00390625F});
  MemoryCheckpoint first("first", 1);
  first.add({"w", DType::bfloat16, {1}}, bytes_of<std::uint16_t>({0}), {{whole_box(Shape{1}), 0}});
  const auto tiny = one_tensor<double>("c", DType::float64, {1}, {0x1p-40});
  std::vector<Source> sources;
  sources.push_back({std::move(first)});
  sources.push_back({a});
  sources.push_back({tiny});
  const auto result = combined(std::move(sources));
  EXPECT_THAT(elements<std::uint16_t>(*result.reader, "w"), ElementsAre(0x3F81));
}

TEST(CombinationTest, LeavesTheRoundingToACast) {
  CombineOptions options;
  options.rounding = Rounding::later;
  const auto result = combined({{one_tensor<float>("a", DType::float32, {1}, {1})},
                                {one_tensor<double>("b", DType::float64, {1}, {0x1p-40})}},
                               options);
  EXPECT_THAT(elements<double>(*result.reader, "w"), ElementsAre(1 + 0x1p-40));
}

TEST(CombinationTest, RoundsWhatNoCastChangesToTheDtypeOfTheFirstSource) {
  CombineOptions options;
  options.rounding = Rounding::later;
  const auto result = combined({{one_tensor<float>("a", DType::float32, {}, {1})},
                                {one_tensor<double>("b", DType::float64, {}, {2})}},
                               options);
  EXPECT_THAT(elements<float>(*result.reader, "w"), ElementsAre(3));
}

TEST(CombinationTest, ASourceTimesOneIsItself) {
  const std::vector<float> odd{-0.0F, 0x1p-149F, std::numeric_limits<float>::infinity(), 1e38F};
  const auto result = combined({{one_tensor<float>("a", DType::float32, {4}, odd)}});
  EXPECT_EQ(elements<std::uint32_t>(*result.reader, "w"),
            elements<std::uint32_t>(one_tensor<float>("a", DType::float32, {4}, odd), "w"));
}

TEST(CombinationTest, AverageAndMovingAverage) {
  const auto source = [](float number) {
    return one_tensor<float>("s", DType::float32, {1}, {number});
  };
  CombineOptions options;
  options.divisor = 3;
  EXPECT_THAT(
      elements<float>(*combined({{source(1)}, {source(2)}, {source(6)}}, options).reader, "w"),
      ElementsAre(3));
  const Step step{.keep = 0.75, .weight = 0.25};
  const auto moving = combined({{source(8)}, {source(4), step}, {source(-1), step}});
  EXPECT_THAT(elements<float>(*moving.reader, "w"), ElementsAre(0.75F * 7 - 0.25F));
}

TEST(CombinationTest, ComplexNumbersAreAddedUp) {
  const auto source = [](float re, float im) {
    return one_tensor<float>("s", DType::complex64, {1}, {re, im});
  };
  const auto result = combined({{source(1, 2)}, {source(3, 5), {.weight = 2}}});
  EXPECT_THAT(elements<float>(*result.reader, "w"), ElementsAre(7, 12));
}

TEST(CombinationTest, SumsInFloat32IfAsked) {
  const auto source = [](float number) {
    return one_tensor<float>("s", DType::float32, {1}, {number});
  };
  CombineOptions options;
  EXPECT_THAT(elements<float>(
                  *combined({{source(1e8F)}, {source(1)}, {source(-1e8F)}}, options).reader, "w"),
              ElementsAre(1));
  options.accumulation = Accumulation::float32;
  EXPECT_THAT(elements<float>(
                  *combined({{source(1e8F)}, {source(1)}, {source(-1e8F)}}, options).reader, "w"),
              ElementsAre(0));
}

TEST(CombinationTest, RefusesSumsThatAreTooLarge) {
  const auto source = [] { return one_tensor<float>("s", DType::float32, {2}, {3e38F, 1}); };
  CombineOptions options;
  const auto refused = combined({{source()}, {source()}}, options);
  EXPECT_THAT([&] { elements<float>(*refused.reader, "w"); },
              ThrowsError(ErrorKind::mismatch, "s + s: w: cast: expected finite numbers"));
  options.on_overflow = reshard::OnOverflow::infinity;
  const auto allowed = combined({{source()}, {source()}}, options);
  EXPECT_THAT(elements<float>(*allowed.reader, "w"),
              ElementsAre(std::numeric_limits<float>::infinity(), 2));
}

TEST(CombinationTest, AMeanThatADtypeHoldsDoesNotOverflowOnItsWay) {
  const auto source = [] {
    return one_tensor<double>("s", DType::float64, {3}, {1.5e308, 1, -1e308});
  };
  CombineOptions options;
  options.divisor = 2;
  EXPECT_THAT(elements<double>(*combined({{source()}, {source()}}, options).reader, "w"),
              ElementsAre(1.5e308, 1, -1e308));
  const auto narrow = [] {
    return one_tensor<float>("s", DType::float32, {2}, {3e38F, -0x1p-140F});
  };
  options.accumulation = Accumulation::float32;
  EXPECT_THAT(elements<float>(*combined({{narrow()}, {narrow()}}, options).reader, "w"),
              ElementsAre(3e38F, -0x1p-140F));
}

TEST(CombinationTest, AnInfiniteSumOfFiniteNumbersCountsAsTooLarge) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto sum = [](CombineOptions options, Accumulation accumulation,
                      reshard::OnOverflow on_overflow) {
    options.accumulation = accumulation;
    options.on_overflow = on_overflow;
    const std::vector<double> numbers{1.5e308, -1.5e308, kInfinity, 2};
    return combined({{one_tensor<double>("s", DType::float64, {4}, numbers), {.weight = 2}}},
                    options);
  };
  for (const Accumulation accumulation : {Accumulation::float64, Accumulation::float32}) {
    const auto refused = sum({}, accumulation, reshard::OnOverflow::refuse);
    EXPECT_THAT([&] { elements<double>(*refused.reader, "w"); },
                ThrowsError(ErrorKind::mismatch, "w: cast: expected finite numbers"));
    constexpr double kLargest = std::numeric_limits<double>::max();
    EXPECT_THAT(elements<double>(*sum({}, accumulation, reshard::OnOverflow::saturate).reader, "w"),
                ElementsAre(kLargest, -kLargest, kInfinity, 4));
    EXPECT_THAT(elements<double>(*sum({}, accumulation, reshard::OnOverflow::infinity).reader, "w"),
                ElementsAre(kInfinity, -kInfinity, kInfinity, 4));
  }
}

TEST(CombinationTest, ASumWithoutASignCountsAsTooLargeForADtypeWithoutInfinity) {
  for (const DType dtype : {DType::float8_e4m3fn, DType::bfloat16}) {
    const auto large = [](double weight) {
      return Source{one_tensor<float>("s", DType::float32, {1}, {3e38F}), {.weight = weight}};
    };
    MemoryCheckpoint first("first", 8);
    first.add({"w", dtype, {1}}, test::Bytes(itemsize(dtype)), {{whole_box(Shape{1}), 0}});
    const auto result = combined({{std::move(first)}, large(1e300), large(-1e300)});
    EXPECT_THAT([&] { test::whole_tensor(*result.reader, 0); },
                ThrowsError(ErrorKind::mismatch, "w: cast: expected finite numbers"))
        << dtype_name(dtype);
  }
}

TEST(CombinationTest, ASumWithoutASignIsNotSaturated) {
  const auto source = [](double weight) {
    return Source{one_tensor<double>("s", DType::float64, {1}, {1e300}), {.weight = weight}};
  };
  CombineOptions options;
  options.on_overflow = reshard::OnOverflow::saturate;
  const auto result = combined({source(1e300), source(-2e300)}, options);
  EXPECT_THAT(
      [&] { elements<double>(*result.reader, "w"); },
      ThrowsError(ErrorKind::mismatch,
                  "w: overflow: expected a sum whose sign is known, to replace it by the largest "
                  "number of this sign"));
}

TEST(CombinationTest, ListsAllProblemsAtOnce) {
  MemoryCheckpoint a("a", 1);
  a.add({"only_a", DType::float32, {1}}, bytes_of<float>({1}), {{whole_box(Shape{1}), 0}});
  a.add({"shape", DType::float32, {2}}, bytes_of<float>({1, 2}), {{whole_box(Shape{2}), 0}});
  a.add({"steps", DType::int64, {1}}, bytes_of<std::int64_t>({1}), {{whole_box(Shape{1}), 0}});
  a.add_value("epoch", 1);
  MemoryCheckpoint b("b", 1);
  b.add({"only_b", DType::float32, {1}}, bytes_of<float>({1}), {{whole_box(Shape{1}), 0}});
  b.add({"shape", DType::float32, {1, 2}}, bytes_of<float>({1, 2}), {{whole_box(Shape{1, 2}), 0}});
  b.add({"steps", DType::int64, {1}}, bytes_of<std::int64_t>({2}), {{whole_box(Shape{1}), 0}});
  b.add_value("epoch", 2);
  const auto problems = combined({{a}, {b}}).problems;
  EXPECT_THAT(texts(problems),
              ElementsAre(HasSubstr("epoch: combine: expected the same value in all sources"),
                          HasSubstr("only_a: combine: expected a tensor of this name in all "
                                    "sources, found none in b"),
                          HasSubstr("only_b: combine: expected a tensor of this name in all "
                                    "sources, found none in a"),
                          HasSubstr("shape: combine: expected float32 [2], as in a, found float32 "
                                    "[1, 2] in b"),
                          HasSubstr("steps: combine: expected equal elements in all sources")));
  CombineOptions options;
  options.selection.only = NameSelection({"steps", "epoch"});
  options.preference = MergePreference::last;
  const auto result = combined({{a}, {b}}, options);
  EXPECT_THAT(result.problems, IsEmpty());
  EXPECT_THAT(elements<std::int64_t>(*result.reader, "steps"), ElementsAre(2));
  EXPECT_EQ(result.reader->read_value(0), Value(2));
  EXPECT_THAT(result.reader->contents().opening_findings, SizeIs(1));
}

std::vector<std::string> values_of(const formats::CheckpointReader& reader) {
  std::vector<std::string> values;
  for (std::size_t i = 0; i < reader.contents().values.size(); ++i) {
    values.push_back(reader.contents().values[i].name + " = " +
                     value_to_string(reader.read_value(i)));
  }
  return values;
}

/// Returns a source to which a test adds values. Its one tensor is equal in all such sources.
MemoryCheckpoint source_of_values(const char* path) {
  return one_tensor<float>(path, DType::float32, {1}, {1});
}

TEST(CombinationTest, APreferredLastSourceGivesTheValuesThatOnlyItHas) {
  MemoryCheckpoint a = one_tensor<float>("a", DType::float32, {1}, {1});
  a.add_value("args.lr", 1);
  a.add_value("only_a", 2);
  a.add_value("args2", 2);
  MemoryCheckpoint b = one_tensor<float>("b", DType::float32, {1}, {3});
  b.add_value("args", 3);
  b.add_value("args2.lr", 4);
  b.add_value("epoch", 7);
  CombineOptions options;
  options.preference = MergePreference::last;
  const auto last = combined({{a}, {b}}, options);
  EXPECT_THAT(last.problems, IsEmpty());
  EXPECT_THAT(values_of(*last.reader),
              ElementsAre("args = 3", "args2.lr = 4", "epoch = 7", "only_a = 2"));
  options.preference = MergePreference::first;
  EXPECT_THAT(values_of(*combined({{a}, {b}}, options).reader),
              ElementsAre("args.lr = 1", "args2 = 2", "only_a = 2"));
}

TEST(CombinationTest, ANoteNamesTheValuesThatOnlyOtherSourcesHave) {
  const MemoryCheckpoint a = one_tensor<float>("a", DType::float32, {1}, {1});
  MemoryCheckpoint b = one_tensor<float>("b", DType::float32, {1}, {2});
  b.add_value("middle", 5);
  const MemoryCheckpoint c = one_tensor<float>("c", DType::float32, {1}, {3});
  CombineOptions options;
  for (const auto preference : {MergePreference::first, MergePreference::last}) {
    options.preference = preference;
    const auto made = combined({{a}, {b}, {c}}, options);
    EXPECT_THAT(values_of(*made.reader), IsEmpty());
    const auto& notes = made.reader->contents().opening_findings;
    EXPECT_TRUE(std::ranges::any_of(notes, [](const auto& note) {
      return note.found == "values that only other sources have, which are left out: 'middle'";
    }));
  }
}

TEST(CombinationTest, TheValuesOfRanksAreThoseOfThePreferredSource) {
  MemoryCheckpoint a = source_of_values("a");
  a.add_value("per_rank.1.seed", 11);
  a.add_value("seed", 10);
  MemoryCheckpoint b = source_of_values("b");
  b.add_value("per_rank.2.seed", 22);
  b.add_value("seed", 20);
  CombineOptions options;
  options.preference = MergePreference::last;
  EXPECT_THAT(values_of(*combined({{a}, {b}}, options).reader),
              ElementsAre("per_rank.2.seed = 22", "seed = 20"));
  options.preference = MergePreference::first;
  EXPECT_THAT(values_of(*combined({{a}, {b}}, options).reader),
              ElementsAre("per_rank.1.seed = 11", "seed = 10"));
}

TEST(CombinationTest, AValueThatOneRankHasInPlaceOfADictIsOfThePreferredSource) {
  MemoryCheckpoint one_value = source_of_values("a");
  one_value.add_value("m.s", 1);
  one_value.add_value("per_rank.1.m", 7);
  MemoryCheckpoint one_dict = source_of_values("a");
  one_dict.add_value("m", 1);
  one_dict.add_value("per_rank.1.m.s", 7);
  one_dict.add_value("per_rank.1.other", 8);
  MemoryCheckpoint dict = source_of_values("b");
  dict.add_value("m.s", 2);
  MemoryCheckpoint value = source_of_values("b");
  value.add_value("m", 2);
  CombineOptions options;
  options.preference = MergePreference::last;
  EXPECT_THAT(values_of(*combined({{one_value}, {dict}}, options).reader), ElementsAre("m.s = 2"));
  EXPECT_THAT(values_of(*combined({{one_dict}, {value}}, options).reader),
              ElementsAre("m = 2", "per_rank.1.other = 8"));
  EXPECT_THAT(values_of(*combined({{dict}, {one_value}}, options).reader),
              ElementsAre("m.s = 1", "per_rank.1.m = 7"));
}

TEST(CombinationTest, AValueIsMissingIfTheSourceThatHasItLacksItsFile) {
  MemoryCheckpoint a = one_tensor<float>("a", DType::float32, {1}, {1});
  a.add_value("b", 1);
  a.add_value("c", 1);
  a.missing_data_for_change().values[0] = "lost.a";
  a.missing_data_for_change().values[1] = "lost.a";
  MemoryCheckpoint b = one_tensor<float>("b", DType::float32, {1}, {1});
  b.add_value("a", 1);
  b.add_value("b", 2);
  b.missing_data_for_change().values[0] = "lost.b";
  CombineOptions options;
  options.preference = MergePreference::last;
  const auto missing = combined({{a}, {b}}, options).reader->find_missing_data().values;
  ASSERT_EQ(missing.size(), 2U);  // of the values a, b and c
  EXPECT_EQ(missing.at(0), "lost.b");
  EXPECT_EQ(missing.at(2), "lost.a");
}

TEST(CombinationTest, AListInOneSourceThatIsADictInTheLastIsRefused) {
  MemoryCheckpoint a = one_tensor<float>("a", DType::float32, {1}, {1});
  a.add_value("l.0", 1).key_path = {"l", std::int64_t{0}};
  MemoryCheckpoint b = one_tensor<float>("b", DType::float32, {1}, {1});
  b.add_value("l.x", 1).key_path = {"l", "x"};
  CombineOptions options;
  options.preference = MergePreference::last;
  EXPECT_THAT(texts(combined({{a}, {b}}, options).problems),
              ElementsAre(HasSubstr("combine: expected names that fit into one nested dict")));
}

TEST(CombinationTest, ASecondNameThatOnlyALaterSourceHasIsNoted) {
  const auto notes = [](bool first_is_tied, bool second_is_tied) {
    MemoryCheckpoint a = one_tensor<float>("a", DType::float32, {1}, {1});
    MemoryCheckpoint b = one_tensor<float>("b", DType::float32, {1}, {3});
    if (first_is_tied) a.add_alias("head", "w");
    if (second_is_tied) b.add_alias("head", "w");
    const CombinedCheckpoint result = combined({{a}, {b}});
    EXPECT_THAT(result.problems, IsEmpty());
    return texts(result.reader->contents().opening_findings);
  };
  EXPECT_THAT(notes(false, true),
              ElementsAre(HasSubstr("second names of tied tensors in later sources (left out): "
                                    "'head'")));
  EXPECT_THAT(notes(true, false), IsEmpty());
  EXPECT_THAT(notes(true, true), IsEmpty());
}

TEST(CombinationTest, OptimizerStateMustBeLeftOut) {
  MemoryCheckpoint a = one_tensor<float>("a", DType::float32, {1}, {1});
  a.add({"optim.state.w.exp_avg", DType::float32, {1}}, bytes_of<float>({1}),
        {{whole_box(Shape{1}), 0}});
  CombineOptions options;
  EXPECT_THAT(texts(combined({{a}}, options).problems),
              ElementsAre(HasSubstr("found 1 entries of optimizer state: optim.state.w.exp_avg")));
  options.selection.optimizer = reshard::OptimizerSelection::leave_out;
  EXPECT_THAT(combined({{a}, {one_tensor<float>("b", DType::float32, {1}, {1})}}, options).problems,
              IsEmpty());
  // Nothing proves whose state this is: it has no parameter, and no `param_groups` beside it.
  MemoryCheckpoint b = one_tensor<float>("b", DType::float32, {1}, {1});
  b.add({"opt.state.0.exp_avg", DType::float32, {1}}, bytes_of<float>({1}),
        {{whole_box(Shape{1}), 0}});
  EXPECT_THAT(texts(combined({{b}}).problems),
              ElementsAre(HasSubstr("found 1 entries of optimizer state: opt.state.0.exp_avg")));
}

TEST(CombinationTest, WhatMayBeCodesOfAQuantizedModelIsRefused) {
  const auto problems = [](const std::vector<TensorMeta>& tensors, const std::string& method) {
    MemoryCheckpoint source("s", 1);
    for (const TensorMeta& meta : tensors) source.add(meta, test::Bytes(meta.nbytes()));
    std::vector<Source> sources;
    sources.push_back({std::move(source), {.weight = 0.5}, method});
    return texts(combined(std::move(sources)).problems);
  };
  const std::vector<TensorMeta> fp8 = {{"l.weight", DType::float8_e4m3fn, {2, 2}},
                                       {"l.wscl", DType::float32, {2}}};
  EXPECT_THAT(problems(fp8, ""), IsEmpty());
  EXPECT_THAT(problems(fp8, "fp8"),
              ElementsAre("s: l.weight: combine: expected numbers to add up, found float8_e4m3fn "
                          "of a model that config.json calls quantized (fp8), which may be codes"));
  const std::vector<TensorMeta> higgs = {{"l.tables", DType::float16, {4}},
                                         {"l.weight", DType::int16, {2, 2}},
                                         {"m.factors", DType::float16, {4}},
                                         {"n.weight", DType::float16, {4}}};
  EXPECT_THAT(problems(higgs, ""),
              ElementsAre(HasSubstr("l.tables: combine: expected numbers to add up, found float16 "
                                    "beside l.weight (int16), which may be scales of codes")));
  EXPECT_THAT(problems(higgs, "higgs"),
              ElementsAre(HasSubstr("l.tables: combine: expected numbers to add up, found float16 "
                                    "of a model that config.json calls quantized (higgs), which "
                                    "may be scales"),
                          HasSubstr("m.factors: combine: expected numbers to add up, found "
                                    "quantized weights (higgs in config.json) of a scheme")));
}

TEST(CombinationTest, StateOfATrainerIsTakenLikeIntegers) {
  const auto source = [](const char* path, DType dtype, const test::Bytes& scale, float weight) {
    MemoryCheckpoint checkpoint(path, 1);
    checkpoint.add({"grad_scaler.scale", dtype, {}}, scale);
    checkpoint.add({"progress.tokens", DType::float32, {1}}, bytes_of<float>({7}));
    checkpoint.add({"w", DType::float32, {1}}, bytes_of<float>({weight}));
    return checkpoint;
  };
  const auto of = [&](const CombineOptions& options) {
    return combined({{source("a", DType::float32, bytes_of<float>({64}), 1)},
                     {source("b", DType::float64, bytes_of<double>({32}), 2)}},
                    options);
  };
  EXPECT_THAT(texts(of({}).problems),
              ElementsAre(HasSubstr("grad_scaler.scale: combine: expected equal elements in all "
                                    "sources, because state of the trainer is not added up")));
  const auto first = of({.preference = MergePreference::first});
  EXPECT_THAT(first.problems, IsEmpty());
  EXPECT_THAT(elements<float>(*first.reader, "grad_scaler.scale"), ElementsAre(64));
  EXPECT_THAT(elements<float>(*first.reader, "progress.tokens"), ElementsAre(7));  // not 14
  EXPECT_THAT(elements<float>(*first.reader, "w"), ElementsAre(3));
  const auto last = of({.preference = MergePreference::last});
  EXPECT_THAT(elements<double>(*last.reader, "grad_scaler.scale"), ElementsAre(32));
  EXPECT_EQ(last.reader->contents().find_tensor("grad_scaler.scale")->meta.dtype, DType::float64);
}

TEST(CombinationTest, AnIncompleteSourceIsRefused) {
  const std::vector<Piece> half{{Box{{0}, {1}}, 0}};
  MemoryCheckpoint b("b", 1);
  b.add({"w", DType::float32, {2}}, bytes_of<float>({1, 2}), half);
  EXPECT_THAT(
      texts(combined({{one_tensor<float>("a", DType::float32, {2}, {1, 2})}, {b}}).problems),
      ElementsAre(HasSubstr("w: combine: expected a whole tensor in b")));
}

TEST(CombinationTest, ATiedTensorMustBeTiedInAllSources) {
  MemoryCheckpoint a = one_tensor<float>("a", DType::float32, {1}, {1});
  MemoryCheckpoint b = one_tensor<float>("b", DType::float32, {1}, {1});
  a.add_alias("tied", "w");
  EXPECT_THAT(combined({{a}, {b}}).problems, IsEmpty());
  EXPECT_THAT(combined({{b}, {a}}).problems, IsEmpty());
  b.add({"tied", DType::float32, {1}}, bytes_of<float>({1}), {{whole_box(Shape{1}), 0}});
  EXPECT_THAT(texts(combined({{a}, {b}}).problems),
              ElementsAre(HasSubstr("tied: combine: expected tied to w, as in a, found a "
                                    "separate tensor in b")));
}

TEST(CombinationTest, ASelectedNameOfATiedTensorNeedsNoOtherName) {
  MemoryCheckpoint tied("tied", 1);
  tied.add({"head", DType::float32, {1}}, bytes_of<float>({1}));
  tied.add_alias("embed", "head");
  tied.add_alias("shared", "head");
  MemoryCheckpoint alone("alone", 1);
  alone.add({"embed", DType::float32, {1}}, bytes_of<float>({3}));
  MemoryCheckpoint other_shape("other", 1);
  other_shape.add({"embed", DType::float32, {2}}, bytes_of<float>({3, 4}));
  CombineOptions options;
  options.divisor = 2;
  options.selection.only = NameSelection({"embed"});
  for (const bool is_tied_first : {true, false}) {
    const auto result =
        is_tied_first ? combined({{tied}, {alone}}, options) : combined({{alone}, {tied}}, options);
    ASSERT_THAT(result.problems, IsEmpty());
    EXPECT_THAT(elements<float>(*result.reader, is_tied_first ? "head" : "embed"), ElementsAre(2));
    EXPECT_EQ(result.counts.num_summed, 1U);
  }
  EXPECT_THAT(texts(combined({{tied}, {other_shape}}, options).problems),
              ElementsAre(HasSubstr("embed: combine: expected float32 [1], as in tied")));
  options.selection.only = NameSelection({"!head", "!shared"});
  EXPECT_THAT(combined({{tied}, {alone}}, options).problems, IsEmpty());
  // A missing file is found under the selected name.
  tied.missing_data_for_change().pieces[0][0] = "lost.file";
  EXPECT_THAT(texts(combined({{alone}, {tied}}, options).problems),
              ElementsAre(HasSubstr("embed: combine: expected all files of tied")));
}

TEST(CombinationTest, ARankWithoutACopyOfItsOwnHasTheCopyOfAll) {
  const auto source = [](const char* path, std::vector<float> copies) {
    MemoryCheckpoint checkpoint(path, 2);
    if (copies.size() > 1) {
      checkpoint.add({"per_rank.1.mean", DType::float32, {1}}, bytes_of<float>({copies[1]}));
    }
    checkpoint.add({"mean", DType::float32, {1}}, bytes_of<float>({copies[0]}));
    return checkpoint;
  };
  const auto result = combined({{source("a", {1, 2})}, {source("b", {10})}});
  ASSERT_THAT(texts(result.problems), IsEmpty());
  EXPECT_THAT(elements<float>(*result.reader, "mean"), ElementsAre(11));
  EXPECT_THAT(elements<float>(*result.reader, "per_rank.1.mean"), ElementsAre(12));
  // The first source decides which copies the result has.
  EXPECT_THAT(texts(combined({{source("b", {10})}, {source("a", {1, 2})}}).problems),
              ElementsAre(HasSubstr("per_rank.1.mean: combine: expected a first source that has "
                                    "this rank's own copy too (give a first), found one copy for "
                                    "all ranks in b (to leave it out, add '!per_rank.*'")));
}

TEST(CombinationTest, NothingIsReadBehindTheFirstDifference) {
  const std::vector<Piece> halves{{FlatRange{0, 1}, 0}, {FlatRange{1, 2}, 0}};
  auto a = one_tensor<std::int8_t>("a", DType::int8, {2}, {1, 2}, halves);
  a.fail_reads_of("w", 1);
  const auto b = one_tensor<std::int8_t>("b", DType::int8, {2}, {3, 2});
  EXPECT_THAT(texts(combined({{a}, {b}}).problems), ElementsAre(HasSubstr("different elements")));
}

/// An adapter of one layer with rank 2.
LoraAdapter adapter_of(Shape down_shape, std::vector<float> down, Shape up_shape,
                       std::vector<float> up, const std::string& more = "") {
  MemoryCheckpoint checkpoint("adapter", 1);
  const auto add = [&](const char* name, const Shape& shape, std::vector<float> numbers) {
    checkpoint.add({name, DType::float32, shape}, bytes_of<float>(numbers),
                   {{whole_box(shape), 0}});
  };
  add("base_model.model.w.lora_A.weight", down_shape, std::move(down));
  add("base_model.model.w.lora_B.weight", up_shape, std::move(up));
  return read_lora_adapter(std::make_unique<MemoryCheckpoint>(std::move(checkpoint)),
                           R"({"peft_type": "LORA", "lora_alpha": 4)" + more + "}", "config", 1.0);
}

MemoryCheckpoint base_of(const Shape& shape, const std::vector<Piece>& pieces) {
  MemoryCheckpoint base("base", 4);
  const auto numel = static_cast<std::size_t>(numel_of(shape));
  base.add({"w.weight", DType::float32, shape}, bytes_of<float>(std::vector<float>(numel, 100)),
           pieces);
  return base;
}

// up * down = [[1, 2, 3], [10, 10, 10], [11, 12, 13], [0, 0, 0]], times 4 / 2
const std::vector<float> kDown{1, 2, 3, 10, 10, 10};
const std::vector<float> kUp{1, 0, 0, 1, 1, 1, 0, 0};

TEST(LoraTest, AddsTheProductOfTheMatricesToAnySharding) {
  const Shape shape{4, 3};
  const std::vector<std::vector<Piece>> layouts{
      {{whole_box(shape), 0}},
      {{FlatRange{0, 5}, 0}, {FlatRange{5, 12}, 1}},
      {{Box{{0, 0}, {4, 1}}, 0}, {Box{{0, 1}, {4, 2}}, 1}},
  };
  for (const auto& pieces : layouts) {
    std::vector<LoraAdapter> adapters;
    adapters.push_back(adapter_of({2, 3}, kDown, {4, 2}, kUp));
    const auto result = combined({{base_of(shape, pieces)}}, {}, std::move(adapters));
    EXPECT_THAT(result.problems, IsEmpty());
    EXPECT_THAT(elements<float>(*result.reader, "w.weight"),
                ElementsAre(102, 104, 106, 120, 120, 120, 122, 124, 126, 100, 100, 100));
  }
}

TEST(LoraTest, AddsTheTransposeToAWeightStoredTheOtherWay) {
  const Shape shape{3, 4};
  std::vector<LoraAdapter> adapters;
  adapters.push_back(adapter_of({2, 3}, kDown, {4, 2}, kUp, R"(, "fan_in_fan_out": true)"));
  const auto result =
      combined({{base_of(shape, {{Box{{0, 0}, {3, 1}}, 0}, {Box{{0, 1}, {3, 3}}, 1}})}}, {},
               std::move(adapters));
  EXPECT_THAT(elements<float>(*result.reader, "w.weight"),
              ElementsAre(102, 120, 122, 100, 104, 120, 124, 100, 106, 120, 126, 100));
}

TEST(LoraTest, OnlyTheConfigurationKnowsHowASquareWeightIsStored) {
  const std::vector<float> down{1, 2};
  const std::vector<float> up{1, 10};
  for (const bool is_transposed : {false, true}) {
    std::vector<LoraAdapter> adapters;
    adapters.push_back(
        adapter_of({1, 2}, down, {2, 1}, up, is_transposed ? R"(, "fan_in_fan_out": true)" : ""));
    const auto result =
        combined({{base_of({2, 2}, {{whole_box(Shape{2, 2}), 0}})}}, {}, std::move(adapters));
    EXPECT_EQ(elements<float>(*result.reader, "w.weight"),
              is_transposed ? (std::vector<float>{104, 140, 108, 180})
                            : (std::vector<float>{104, 108, 140, 180}));
  }
}

/// Merges an adapter of the square weight `h.0.attn.c_proj.weight` into a base that has it and
/// these other layers, each with a weight and a bias.
CombinedCheckpoint with_square_weight(const std::vector<std::pair<std::string, Shape>>& layers,
                                      bool is_said_to_be_transposed) {
  MemoryCheckpoint base("base", 1);
  const auto add = [&](const std::string& name, const Shape& shape) {
    const auto numel = static_cast<std::size_t>(numel_of(shape));
    base.add({name, DType::float32, shape}, bytes_of<float>(std::vector<float>(numel, 100)));
  };
  add("h.0.attn.c_proj.weight", {2, 2});
  add("h.0.attn.c_proj.bias", {2});
  for (const auto& [name, shape] : layers) {
    add(name + ".weight", shape);
    add(name + ".bias", {2});
  }
  auto adapter = std::make_unique<MemoryCheckpoint>("adapter", 1);
  const std::string module = "base_model.model.h.0.attn.c_proj.lora_";
  adapter->add({module + "A.weight", DType::float32, {1, 2}}, bytes_of<float>({1, 2}));
  adapter->add({module + "B.weight", DType::float32, {2, 1}}, bytes_of<float>({1, 10}));
  const std::string config = R"({"peft_type": "LORA", "lora_alpha": 2, "fan_in_fan_out": )" +
                             std::string(is_said_to_be_transposed ? "true}" : "false}");
  std::vector<LoraAdapter> adapters;
  adapters.push_back(read_lora_adapter(std::move(adapter), config, "config", 1.0));
  return combined({{std::move(base)}}, {}, std::move(adapters));
}

TEST(LoraTest, OtherLayersTellHowASquareWeightIsStored) {
  const std::vector<float> as_is{102, 104, 120, 140};
  const std::vector<float> transposed{102, 120, 104, 140};
  using Layers = std::vector<std::pair<std::string, Shape>>;
  const struct {
    Layers layers;
    bool is_said;
    std::vector<float> merged;  // empty: refused
  } cases[] = {
      {{{"h.0.mlp.c_proj", {3, 2}}}, false, transposed},  // Conv1D: the bias has 2 outputs
      {{{"h.0.mlp.c_proj", {3, 2}}}, true, transposed},
      {{{"h.0.mlp.c_proj", {2, 3}}}, false, as_is},
      {{{"h.0.mlp.c_proj", {2, 3}}}, true, as_is},  // as in PEFT
      {{{"h.0.mlp.c_fc", {3, 2}}}, false, {}},
      {{{"h.0.mlp.c_fc", {3, 2}}}, true, transposed},
      {{{"h.0.mlp.c_fc", {2, 3}}}, false, as_is},
      {{{"h.0.mlp.c_fc", {2, 3}}}, true, transposed},
      {{{"h.0.mlp.c_proj", {3, 2}}, {"h.1.mlp.c_proj", {2, 3}}}, false, {}},
  };
  for (const auto& [layers, is_said, merged] : cases) {
    SCOPED_TRACE(layers[0].first + " " + shape_to_string(layers[0].second) +
                 (is_said ? " true" : ""));
    const auto result = with_square_weight(layers, is_said);
    if (merged.empty()) {
      EXPECT_THAT(texts(result.problems),
                  ElementsAre(HasSubstr("h.0.attn.c_proj.weight: combine: expected fan_in_fan_out: "
                                        "true in adapter, because the weight is square")));
      continue;
    }
    ASSERT_THAT(result.problems, IsEmpty());
    EXPECT_EQ(elements<float>(*result.reader, "h.0.attn.c_proj.weight"), merged);
  }
}

/// An adapter that has only these tensors. `numbers` are the elements of each.
template <class Number>
LoraAdapter replacing_adapter(const std::vector<std::string>& names, DType dtype,
                              const std::vector<Number>& numbers) {
  auto adapter = std::make_unique<MemoryCheckpoint>("adapter", 1);
  const Shape shape{static_cast<std::int64_t>(numbers.size())};
  for (const std::string& name : names) {
    adapter->add({"base_model.model." + name, dtype, shape}, bytes_of<Number>(numbers));
  }
  return read_lora_adapter(std::move(adapter), R"({"peft_type": "LORA", "lora_alpha": 4})",
                           "config", 1.0);
}

/// Reads an adapter from `checkpoint`, with a scale of `scale` for its matrices of rank 1.
LoraAdapter adapter_in(MemoryCheckpoint checkpoint, double scale = 1.0) {
  return read_lora_adapter(std::make_unique<MemoryCheckpoint>(std::move(checkpoint)),
                           R"({"peft_type": "LORA", "lora_alpha": 1})", "config", scale);
}

/// Adds the matrices of one layer to an adapter. They add `change` to a weight of one element.
void add_layer(MemoryCheckpoint& adapter, const std::string& layer, float change) {
  adapter.add({layer + ".lora_A.weight", DType::float32, {1, 1}}, bytes_of<float>({change}));
  adapter.add({layer + ".lora_B.weight", DType::float32, {1, 1}}, bytes_of<float>({1}));
}

void add_number(MemoryCheckpoint& checkpoint, const std::string& name, float number) {
  checkpoint.add({name, DType::float32, {1, 1}}, bytes_of<float>({number}));
}

template <class... Adapter>
CombinedCheckpoint merged(const MemoryCheckpoint& base, Adapter... adapter) {
  std::vector<LoraAdapter> adapters;
  (adapters.push_back(std::move(adapter)), ...);
  return combined({{base}}, {}, std::move(adapters));
}

TEST(LoraTest, TiedTensorsOfAnAdapterChangeEachLayer) {
  MemoryCheckpoint base("base", 1);
  for (const char* const name : {"a.weight", "b.weight", "n.weight", "o.weight"}) {
    add_number(base, name, 100);
  }
  MemoryCheckpoint adapter("adapter", 1);
  add_layer(adapter, "a", 2);
  adapter.add_alias("b.lora_A.weight", "a.lora_A.weight");
  adapter.add_alias("b.lora_B.weight", "a.lora_B.weight");
  add_number(adapter, "n.weight", 7);
  adapter.add_alias("o.weight", "n.weight");
  const auto result = merged(base, adapter_in(adapter));
  ASSERT_THAT(result.problems, IsEmpty());
  EXPECT_EQ(result.counts.adapters.at(0).num_changed, 2U);
  EXPECT_EQ(result.counts.adapters.at(0).num_replaced, 2U);
  for (const auto& [name, number] : {std::pair("a.weight", 102.0F),
                                     {"b.weight", 102.0F},
                                     {"n.weight", 7.0F},
                                     {"o.weight", 7.0F}}) {
    EXPECT_THAT(elements<float>(*result.reader, name), ElementsAre(number)) << name;
  }
}

/// An adapter of an embedding, with the copy of the base's weight that PEFT stores beside it.
LoraAdapter adapter_with_copy(float change, DType dtype, const test::Bytes& copy,
                              double scale = 1.0) {
  MemoryCheckpoint adapter("adapter", 1);
  add_layer(adapter, "e", change);
  adapter.add({"e.base_layer.weight", dtype, {1, 1}}, copy);
  return adapter_in(std::move(adapter), scale);
}

TEST(LoraTest, ACopyOfTheBaseIsNoReplacement) {
  MemoryCheckpoint base("base", 1);
  add_number(base, "e.weight", 100);
  const auto copy = bytes_of<float>({100});
  const auto wide = bytes_of<double>({100});
  const auto result = merged(base, adapter_with_copy(1, DType::float32, copy),
                             adapter_with_copy(2, DType::float64, wide));
  ASSERT_THAT(result.problems, IsEmpty());
  EXPECT_EQ(result.counts.adapters.at(0).num_replaced, 0U);
  EXPECT_THAT(elements<float>(*result.reader, "e.weight"), ElementsAre(103));
  // PEFT loads the copy, so a base with other numbers is replaced.
  const auto other = merged(base, adapter_with_copy(1, DType::float64, bytes_of<double>({50})));
  EXPECT_EQ(other.counts.adapters.at(0).num_replaced, 1U);
  EXPECT_THAT(elements<float>(*other.reader, "e.weight"), ElementsAre(51));
}

TEST(LoraTest, AnAdapterThatIsTakenBackGivesTheBase) {
  MemoryCheckpoint merged_model("merged", 1);
  add_number(merged_model, "e.weight", 103);
  const auto result =
      merged(merged_model, adapter_with_copy(3, DType::float32, bytes_of<float>({100}), -1.0));
  ASSERT_THAT(result.problems, IsEmpty());
  EXPECT_THAT(elements<float>(*result.reader, "e.weight"), ElementsAre(100));
}

TEST(LoraTest, AnAdapterThatReplacesTensorsIsNotTakenBack) {
  MemoryCheckpoint base("base", 1);
  add_number(base, "n.weight", 7);
  MemoryCheckpoint adapter("adapter", 1);
  add_number(adapter, "n.weight", 7);
  EXPECT_THAT(texts(merged(base, adapter_in(adapter, -0.5)).problems),
              ElementsAre(HasSubstr("n.weight: combine: expected a scale of adapter that is "
                                    "not negative, because it replaces this tensor")));
}

TEST(LoraTest, ATensorIsReplacedByEqualOnesOnly) {
  MemoryCheckpoint base("base", 1);
  add_number(base, "head.weight", 100);
  base.add_alias("embed.weight", "head.weight");
  const auto adapter_of_both = [](float head, float embed) {
    MemoryCheckpoint adapter("adapter", 1);
    add_number(adapter, "head.weight", head);
    add_number(adapter, "embed.weight", embed);
    return adapter_in(std::move(adapter));
  };
  const auto equal = merged(base, adapter_of_both(7, 7), adapter_of_both(7, 7));
  ASSERT_THAT(equal.problems, IsEmpty());
  EXPECT_EQ(equal.counts.adapters.at(0).num_replaced, 1U);
  EXPECT_THAT(elements<float>(*equal.reader, "head.weight"), ElementsAre(7));
  EXPECT_THAT(texts(merged(base, adapter_of_both(7, 8)).problems),
              ElementsAre(HasSubstr("head.weight: combine: expected one tensor of the adapters "
                                    "that replaces this one, found a second one with other "
                                    "numbers: head.weight in adapter")));
}

// PEFT stores both names of a tied tensor. Hugging Face's files have only the input embedding.
TEST(LoraTest, AnAdapterMayStoreATiedTensorTwice) {
  const std::string input = "model.embed_tokens.weight";
  const auto merged_with = [&](const MemoryCheckpoint& adapter, bool is_tied,
                               const std::string& prefix = "") {
    MemoryCheckpoint base("base", 1);
    add_number(base, prefix + input, 100);
    CombineOptions options;
    options.has_tied_embeddings = is_tied;
    std::vector<LoraAdapter> adapters;
    adapters.push_back(adapter_in(adapter));
    return combined({{base}}, options, std::move(adapters));
  };
  const auto adapter_of_both = [&](float output) {
    MemoryCheckpoint adapter("adapter", 1);
    add_number(adapter, "lm_head.weight", output);
    add_number(adapter, input, 7);
    return adapter;
  };
  for (const char* const prefix : {"", "run."}) {
    const auto equal = merged_with(adapter_of_both(7), true, prefix);
    ASSERT_THAT(texts(equal.problems), IsEmpty());
    EXPECT_EQ(equal.counts.adapters.at(0).num_replaced, 1U);
    EXPECT_THAT(elements<float>(*equal.reader, prefix + input), ElementsAre(7));
  }
  const std::string refused =
      "lm_head.weight: combine: expected the same new tensor as for model.embed_tokens.weight, to "
      "which config.json ties this one, found another change in adapter, and no such tensor in "
      "base";
  EXPECT_THAT(texts(merged_with(adapter_of_both(8), true).problems),
              ElementsAre(HasSubstr(refused)));
  EXPECT_THAT(texts(merged_with(adapter_of_both(7), false).problems),
              ElementsAre(HasSubstr("expected a tensor of this name")));
  MemoryCheckpoint unchanged("adapter", 1);
  add_number(unchanged, "lm_head.weight", 100);
  EXPECT_THAT(texts(merged_with(unchanged, true).problems), IsEmpty());
  MemoryCheckpoint product("adapter", 1);
  add_layer(product, "lm_head", 1);
  add_layer(product, "model.embed_tokens", 1);
  EXPECT_THAT(texts(merged_with(product, true).problems), ElementsAre(HasSubstr(refused)));
}

TEST(LoraTest, TheTensorsOfSingleRanksChangeToo) {
  MemoryCheckpoint base("base", 1);
  add_number(base, "per_rank.1.model.w.weight", 200);
  add_number(base, "per_rank.1.model.n.weight", 9);
  add_number(base, "model.w.weight", 100);
  add_number(base, "model.n.weight", 8);
  MemoryCheckpoint adapter("adapter", 1);
  add_layer(adapter, "w", 3);
  add_number(adapter, "n.weight", 7);
  const auto result = merged(base, adapter_in(adapter));
  ASSERT_THAT(result.problems, IsEmpty());
  EXPECT_THAT(elements<float>(*result.reader, "model.w.weight"), ElementsAre(103));
  EXPECT_THAT(elements<float>(*result.reader, "per_rank.1.model.w.weight"), ElementsAre(203));
  EXPECT_THAT(elements<float>(*result.reader, "per_rank.1.model.n.weight"), ElementsAre(7));
}

TEST(LoraTest, TheSelectionSaysWhichOfTwoModelsAnAdapterChanges) {
  MemoryCheckpoint base("base", 1);
  add_number(base, "ema.w.weight", 200);
  add_number(base, "model.w.weight", 100);
  const auto with_only = [&](std::vector<std::string> only) {
    MemoryCheckpoint adapter("adapter", 1);
    add_layer(adapter, "w", 3);
    std::vector<LoraAdapter> adapters;
    adapters.push_back(adapter_in(std::move(adapter)));
    CombineOptions options;
    options.selection.only = NameSelection(std::move(only));
    return combined({{base}}, options, std::move(adapters));
  };
  const auto result = with_only({"model"});
  ASSERT_THAT(result.problems, IsEmpty());
  EXPECT_THAT(elements<float>(*result.reader, "model.w.weight"), ElementsAre(103));
  EXPECT_EQ(result.counts.adapters[0].added_prefix, "model.");
  EXPECT_THAT(texts(with_only({}).problems),
              ElementsAre(HasSubstr("w.weight: combine: expected a tensor of this name")));
}

TEST(LoraTest, TheBaseMayLackAPrefixOfTheAdaptersNames) {
  const auto with_base = [](const std::vector<std::string>& names) {
    MemoryCheckpoint base("base", 1);
    for (const std::string& name : names) add_number(base, name.c_str(), 100);
    MemoryCheckpoint adapter("adapter", 1);
    add_layer(adapter, "transformer.h.0.w", 3);
    add_layer(adapter, "transformer.h.1.w", 4);
    std::vector<LoraAdapter> adapters;
    adapters.push_back(adapter_in(std::move(adapter)));
    return combined({{base}}, {}, std::move(adapters));
  };
  const auto result = with_base({"h.0.w.weight", "h.1.w.weight"});
  ASSERT_THAT(result.problems, IsEmpty());
  EXPECT_THAT(elements<float>(*result.reader, "h.0.w.weight"), ElementsAre(103));
  EXPECT_THAT(elements<float>(*result.reader, "h.1.w.weight"), ElementsAre(104));
  EXPECT_EQ(result.counts.adapters[0].removed_prefix, "transformer.");
  EXPECT_EQ(result.counts.adapters[0].added_prefix, "");
  // It must fit all tensors, and be the only one.
  EXPECT_THAT(texts(with_base({"h.0.w.weight"}).problems), SizeIs(2));
  EXPECT_THAT(
      texts(with_base({"0.w.weight", "1.w.weight", "h.0.w.weight", "h.1.w.weight"}).problems),
      SizeIs(2));
}

TEST(CombinationTest, AdaptersHaveNoSum) {
  MemoryCheckpoint adapter("adapter", 1);
  add_layer(adapter, "w", 3);
  const std::string refused =
      "adapter: w.lora_A.weight: combine: expected no LoRA adapter, because its change is a "
      "product of matrices";
  EXPECT_THAT(texts(combined({{adapter, {.weight = -1}}}).problems),
              ElementsAre(HasSubstr(refused)));
  EXPECT_THAT(texts(combined({{adapter}, {adapter}}).problems), ElementsAre(HasSubstr(refused)));
  EXPECT_THAT(combined({{adapter}}).problems, IsEmpty());  // a copy
  MemoryCheckpoint of_embedding("adapter", 1);
  for (const char* const end : {"lora_embedding_A", "lora_embedding_B", "base_layer.weight"}) {
    add_number(of_embedding, std::string("base_model.model.e.") + end, 1);
  }
  EXPECT_THAT(texts(combined({{of_embedding, {.weight = 2}}}).problems),
              ElementsAre(HasSubstr("expected no LoRA adapter")));
}

TEST(CombinationTest, AdaptersOfOtherLibrariesHaveNoSum) {
  for (const std::string name :
       {"lora_unet_to_q.lora_down.weight", "lora_unet_to_q.lora_up.weight",  // kohya
        "a.processor.to_q_lora.down.weight", "a.to_q.lora.up.weight",        // diffusers
        "layers.0.attn.q_proj.lora_a.weight",
        "model.layers.0.mlp.up_proj.lora_b",  // torchtune, MLX
        "decoder.linear_qkv.adapter.linear_in.weight", "decoder.adapter.linear_out.weight",  // NeMo
        "lora_unet_to_q.hada_w1_a", "lora_unet_to_q.lokr_w1", "q_proj.vera_lambda_b"}) {
    MemoryCheckpoint adapter("adapter", 1);
    add_number(adapter, name, 1);
    add_number(adapter, "lora_unet_to_q.alpha", 1);
    EXPECT_THAT(texts(combined({{adapter, {.weight = 0.5}}}).problems),
                ElementsAre(HasSubstr(name + ": combine: expected no LoRA adapter")));
  }
  MemoryCheckpoint model("model", 1);
  for (const char* const name : {"w_lora.lora.0.weight", "adapter.linear_in_proj.weight",
                                 "color_a.weight", "flora_a.weight", "lora.weight"}) {
    add_number(model, name, 1);
  }
  EXPECT_THAT(combined({{model, {.weight = 0.5}}}).problems, IsEmpty());
}

TEST(CombinationTest, AModelWithMatricesOfAnAdapterIsAddedUpWithANote) {
  for (const std::string weight : {"w.base_layer.weight", "w.weight"}) {
    MemoryCheckpoint model("model", 1);
    for (const char* const role : {"w.lora_A.default.weight", "w.lora_B.default.weight"}) {
      add_number(model, role, 1);
    }
    add_number(model, weight, 100);
    const auto mean = combined({{model}, {model}}, {.divisor = 2});
    EXPECT_THAT(mean.problems, IsEmpty());
    EXPECT_THAT(texts(mean.reader->contents().opening_findings),
                ElementsAre(HasSubstr("model: w.lora_A.default.weight: combine: expected no "
                                      "matrices of an adapter beside the weights")));
    EXPECT_THAT(combined({{model}}).reader->contents().opening_findings, IsEmpty());  // a copy
  }
}

TEST(LoraTest, NotesTheValuesAndTextsOfAnAdapter) {
  MemoryCheckpoint base("base", 1);
  add_number(base, "w.weight", 100);
  base.contents_for_change().annotations["license"] = "mit";
  MemoryCheckpoint adapter("adapter", 1);
  add_layer(adapter, "w", 3);
  adapter.contents_for_change().annotations = {{"format", "pt"}, {"license", "mit"}};
  EXPECT_THAT(merged(base, adapter_in(adapter)).reader->contents().opening_findings, IsEmpty());
  adapter.add_value("epoch", Value(7));
  adapter.contents_for_change().annotations["made_by"] = "a test";
  EXPECT_THAT(texts(merged(base, adapter_in(adapter)).reader->contents().opening_findings),
              ElementsAre(HasSubstr("base: combine: expected only tensors in an adapter, found "
                                    "values or annotations in adapter, which are left out: "
                                    "'epoch' and 1 more")));
}

TEST(LoraTest, TheFileOfOneRankIsNoWholeAdapter) {
  MemoryCheckpoint base("base", 1);
  add_number(base, "w.weight", 100);
  MemoryCheckpoint adapter("adapter", 1);
  add_layer(adapter, "w", 3);
  adapter.contents_for_change().part = formats::PartOfWhole{};
  EXPECT_TRUE(merged(base, adapter_in(adapter)).reader->contents().part);
}

TEST(LoraTest, ReplacesACounterThatCannotBeAddedUp) {
  MemoryCheckpoint base("base", 1);
  base.add({"bn.num_batches_tracked", DType::int64, {1}}, bytes_of<std::int64_t>({7}));
  std::vector<LoraAdapter> adapters;
  adapters.push_back(
      replacing_adapter<std::int64_t>({"bn.num_batches_tracked"}, DType::int64, {9}));
  const auto result = combined({{base}}, {}, std::move(adapters));
  ASSERT_THAT(result.problems, IsEmpty());
  EXPECT_THAT(elements<std::int64_t>(*result.reader, "bn.num_batches_tracked"), ElementsAre(9));
  EXPECT_EQ(result.counts.adapters.at(0).num_replaced, 1U);
  adapters.clear();
  adapters.push_back(replacing_adapter<float>({"bn.num_batches_tracked"}, DType::float32, {9}));
  EXPECT_THAT(texts(combined({{base}}, {}, std::move(adapters)).problems),
              ElementsAre(HasSubstr("expected int64 [1], as in base, found float32 [1]")));
}

// A file of torch.save says which layers share matrices. Each of these layers has its change.
TEST(LoraTest, LayersThatShareTheirMatricesAreAllChanged) {
  auto adapter = std::make_unique<MemoryCheckpoint>("adapter", 1);
  for (const std::string role : {"lora_A", "lora_B"}) {
    adapter->add({"base_model.model.a." + role + ".weight", DType::float32, {1, 1}},
                 bytes_of<float>({2}));
    adapter->add_alias("base_model.model.b." + role + ".weight",
                       "base_model.model.a." + role + ".weight");
  }
  MemoryCheckpoint base("base", 1);
  for (const std::string name : {"a.weight", "b.weight"}) {
    base.add({name, DType::float32, {1, 1}}, bytes_of<float>({10}));
  }
  std::vector<LoraAdapter> adapters;
  adapters.push_back(read_lora_adapter(std::move(adapter),
                                       R"({"peft_type": "LORA", "lora_alpha": 1})", "config", 1.0));
  const auto result = combined({{std::move(base)}}, {}, std::move(adapters));
  ASSERT_THAT(result.problems, IsEmpty());
  EXPECT_EQ(result.counts.adapters.at(0).num_changed, 2U);
  EXPECT_THAT(elements<float>(*result.reader, "a.weight"), ElementsAre(14));
  EXPECT_THAT(elements<float>(*result.reader, "b.weight"), ElementsAre(14));
}

// The base ties the layers, too, or has one of them only, like the files of Hugging Face.
TEST(LoraTest, ATensorThatTheBaseTiesGetsASharedChangeOnce) {
  for (const bool is_tied : {false, true}) {
    auto adapter = std::make_unique<MemoryCheckpoint>("adapter", 1);
    for (const std::string role : {"lora_A", "lora_B"}) {
      adapter->add({"base_model.model.b." + role + ".weight", DType::float32, {1, 1}},
                   bytes_of<float>({2}));
      adapter->add_alias("base_model.model.a." + role + ".weight",
                         "base_model.model.b." + role + ".weight");
    }
    MemoryCheckpoint base("base", 1);
    base.add({"net.b.weight", DType::float32, {1, 1}}, bytes_of<float>({10}));
    if (is_tied) base.add_alias("net.a.weight", "net.b.weight");
    std::vector<LoraAdapter> adapters;
    adapters.push_back(read_lora_adapter(
        std::move(adapter), R"({"peft_type": "LORA", "lora_alpha": 1})", "config", 1.0));
    const auto result = combined({{std::move(base)}}, {}, std::move(adapters));
    ASSERT_THAT(result.problems, IsEmpty());
    EXPECT_THAT(elements<float>(*result.reader, "net.b.weight"), ElementsAre(14));
  }
}

// PEFT stores a tied tensor under both names. The base has it tied, or like Hugging Face once.
TEST(LoraTest, ReplacesATiedTensorOnce) {
  for (const bool is_tied : {false, true}) {
    auto adapter = std::make_unique<MemoryCheckpoint>("adapter", 1);
    adapter->add({"base_model.model.embed.weight", DType::float32, {1}}, bytes_of<float>({3}));
    adapter->add_alias("base_model.model.a_head.weight", "base_model.model.embed.weight");
    MemoryCheckpoint base("base", 1);
    base.add({"net.embed.weight", DType::float32, {1}}, bytes_of<float>({10}));
    if (is_tied) base.add_alias("net.a_head.weight", "net.embed.weight");
    std::vector<LoraAdapter> adapters;
    adapters.push_back(read_lora_adapter(
        std::move(adapter), R"({"peft_type": "LORA", "lora_alpha": 1})", "config", 1.0));
    const auto result = combined({{std::move(base)}}, {}, std::move(adapters));
    ASSERT_THAT(result.problems, IsEmpty());
    EXPECT_EQ(result.counts.adapters.at(0).num_replaced, 1U);
    EXPECT_THAT(elements<float>(*result.reader, "net.embed.weight"), ElementsAre(3));
  }
}

TEST(LoraTest, LeavesOutWhatOnlyTrainingWithVeloraNeeds) {
  MemoryCheckpoint base("base", 1);
  base.add({"w.weight", DType::float32, {1}}, bytes_of<float>({100}));
  std::vector<LoraAdapter> adapters;
  adapters.push_back(
      replacing_adapter<float>({"v.lora_velora_embed", "w.weight"}, DType::float32, {1}));
  const auto result = combined({{std::move(base)}}, {}, std::move(adapters));
  ASSERT_THAT(result.problems, IsEmpty());
  EXPECT_THAT(texts(result.reader->contents().opening_findings),
              ElementsAre(HasSubstr("left out: 'base_model.model.v.lora_velora_embed'")));
}

TEST(LoraTest, NotesThatATiedEmbeddingChangesBothEndsOfTheModel) {
  const auto notes_of = [](const std::vector<std::string>& stored, bool is_tied) {
    MemoryCheckpoint base("base", 1);
    for (const std::string& name : std::set<std::string>(stored.begin(), stored.end())) {
      base.add({name, DType::float32, {1}}, bytes_of<float>({100}));
    }
    std::vector<LoraAdapter> adapters;
    adapters.push_back(replacing_adapter<float>({stored[0]}, DType::float32, {1}));
    CombineOptions options;
    options.has_tied_embeddings = is_tied;
    const auto result = combined({{std::move(base)}}, options, std::move(adapters));
    return texts(result.reader->contents().opening_findings);
  };
  const std::string embedding = "model.embed_tokens.weight";
  EXPECT_THAT(notes_of({embedding, "model.norm.weight"}, true),
              ElementsAre(HasSubstr("a loader gives the change to the output layer too, which is "
                                    "not stored: 'model.embed_tokens.weight'")));
  EXPECT_THAT(notes_of({"lm_head.weight"}, true), ElementsAre(HasSubstr("the input embedding")));
  EXPECT_THAT(notes_of({embedding}, false), IsEmpty());
  for (const auto& stored : {std::vector<std::string>{embedding, "lm_head.weight"},
                             std::vector<std::string>{"lm_head.weight", embedding}}) {
    EXPECT_THAT(notes_of(stored, true),
                ElementsAre(HasSubstr("found a change to one of them, and a loader keeps both "
                                      "tensors only if config.json says \"tie_word_embeddings\": "
                                      "false: '" +
                                      stored[0] + "'")));
    EXPECT_THAT(notes_of(stored, false), IsEmpty());
  }
  EXPECT_THAT(notes_of({"model.norm.weight", embedding}, true), IsEmpty());
}

/// Returns the notes about an adapter that replaces both embeddings, of a base that stores both and
/// whose config.json ties them.
std::vector<std::string> notes_of_both_embeddings(float input, float output) {
  MemoryCheckpoint base("base", 1);
  auto adapter = std::make_unique<MemoryCheckpoint>("adapter", 1);
  for (const auto& [name, number] :
       {std::pair("lm_head.weight", output), {"embed_in.weight", input}}) {
    base.add({name, DType::float32, {1}}, bytes_of<float>({100}));
    adapter->add({name, DType::float32, {1}}, bytes_of<float>({number}));
  }
  std::vector<LoraAdapter> adapters;
  adapters.push_back(read_lora_adapter(std::move(adapter),
                                       R"({"peft_type": "LORA", "lora_alpha": 4})", "config", 1.0));
  CombineOptions options;
  options.has_tied_embeddings = true;
  return texts(combined({{std::move(base)}}, options, std::move(adapters))
                   .reader->contents()
                   .opening_findings);
}

TEST(LoraTest, NotesThatTiedEmbeddingsGetDifferentChanges) {
  EXPECT_THAT(notes_of_both_embeddings(1, 1), IsEmpty());
  EXPECT_THAT(notes_of_both_embeddings(1, 2), ElementsAre(HasSubstr("found different changes")));
}

TEST(LoraTest, TheConfigurationOfTheBaseSaysWhetherEmbeddingsAreTied) {
  const auto is_tied = [](const std::string& config) {
    return says_tied_embeddings(test::MemoryFiles("dir", {{"config.json", config}}), "dir");
  };
  const std::string llama = R"("architectures": ["LlamaForCausalLM"])";
  EXPECT_TRUE(is_tied("{" + llama + R"(, "tie_word_embeddings": true})"));
  EXPECT_FALSE(is_tied("{" + llama + R"(, "tie_word_embeddings": false})"));
  EXPECT_FALSE(is_tied("{" + llama + R"(, "text_config": {"tie_word_embeddings": false}})"));
  EXPECT_TRUE(is_tied(R"({"architectures": ["GPT2LMHeadModel"]})"));
  EXPECT_FALSE(is_tied(R"({"architectures": ["BertForSequenceClassification"]})"));
  EXPECT_FALSE(is_tied("not JSON"));
  EXPECT_FALSE(says_tied_embeddings(test::MemoryFiles("dir", {}), "dir"));
}

TEST(LoraTest, TheBiasTellsHowAWeightIsStored) {
  MemoryCheckpoint base = base_of({3, 4}, {{whole_box(Shape{3, 4}), 0}});
  base.add({"w.bias", DType::float32, {4}}, bytes_of<float>({0, 0, 0, 0}));
  std::vector<LoraAdapter> adapters;
  adapters.push_back(adapter_of({2, 3}, kDown, {4, 2}, kUp));  // without fan_in_fan_out
  const auto result = combined({{std::move(base)}}, {}, std::move(adapters));
  ASSERT_THAT(result.problems, IsEmpty());
  EXPECT_THAT(elements<float>(*result.reader, "w.weight"),
              ElementsAre(102, 120, 122, 100, 104, 120, 124, 100, 106, 120, 126, 100));
}

TEST(LoraTest, ScalesByPatternAndRank) {
  const std::vector<std::pair<std::string, double>> cases{
      {"", 2},
      {R"(, "use_rslora": true)", 4 / std::sqrt(2.0)},
      {R"(, "use_rslora": 0, "use_dora": 0, "layer_replication": "", "use_qalora": 0.0)", 2},
      {R"(, "use_rslora": 1)", 4 / std::sqrt(2.0)},
      {R"(, "alpha_pattern": {"x": 6, "w": 8})", 4},
      {R"(, "alpha_pattern": {"[vw]": 8, "w": 6})", 4},
      {R"(, "alpha_pattern": {"ww": 8})", 2},
      {R"(, "alpha_pattern": null, "r": 2)", 2},
      {R"(, "r": 8, "rank_pattern": {"w": 2}, "alpha_pattern": {"w": 8})", 4},
      {R"x(, "alpha_pattern": {"(q|k|v|o|w)": 8})x", 4},
      {R"x(, "alpha_pattern": {"(w+)+": 8})x", 4},
      {R"x(, "alpha_pattern": {"(w|w){1,30}!": 8})x", 2},
      {R"x(, "alpha_pattern": {".*(layers\\.[0-9]+\\.)?w": 8})x", 4},
  };
  for (const auto& [more, scale] : cases) {
    SCOPED_TRACE(more);
    EXPECT_EQ(adapter_of({2, 3}, kDown, {4, 2}, kUp, more).changes.at(0).scale, scale);
  }
}

TEST(LoraTest, RefusesWhatIsNoPlainLora) {
  const auto open = [](const std::string& config) {
    return [=] {
      read_lora_adapter(std::make_unique<MemoryCheckpoint>("adapter", 1), config, "c", 1.0);
    };
  };
  EXPECT_THAT(open(R"({"peft_type": "LOHA"})"),
              ThrowsError(ErrorKind::unsupported, "peft_type: expected LORA, found 'LOHA'"));
  EXPECT_THAT(open(R"({"peft_type": "LORA", "use_dora": true})"),
              ThrowsError(ErrorKind::unsupported, "use_dora: expected this option to be unset"));
  for (const std::string init : {"pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga"}) {
    EXPECT_THAT(
        open(R"({"peft_type": "LORA", "lora_alpha": 1, "init_lora_weights": ")" + init + "\"}"),
        ThrowsError(ErrorKind::unsupported,
                    "init_lora_weights: expected an initialization that leaves the weights "
                    "of the base as they are, found '" +
                        init + "'"));
  }
  for (const std::string init : {"true", "false", "null", "\"gaussian\"", "\"eva\"", "\"mica\""}) {
    std::string message;
    try {
      open(R"({"peft_type": "LORA", "lora_alpha": 1, "init_lora_weights": )" + init + "}")();
    } catch (const Error& error) {
      message = error.what();
    }
    EXPECT_THAT(message, HasSubstr("expected tensors, such as lora_A"));  // it has none
  }
  EXPECT_THAT(open(R"({"peft_type": "LORA"})"),
              ThrowsError(ErrorKind::corruption, "lora_alpha: expected a number, found none"));
  EXPECT_THAT(open(R"({"peft_type": "LORA", "lora_alpha": 1, "alpha_pattern": {"(": 1}})"),
              ThrowsError(ErrorKind::unsupported, "expected a regular expression"));
  EXPECT_THAT(open(R"({"peft_type": "LORA", "lora_alpha": 1, "alpha_pattern": ["w"]})"),
              ThrowsError(ErrorKind::corruption,
                          "alpha_pattern: expected a dict of patterns, found ['w']"));
}

// Shows E3. PEFT divides by the rank that the configuration states.
TEST(LoraTest, RefusesARankThatTheMatricesDoNotHave) {
  for (const char* const more : {R"(, "r": 3)", R"(, "r": 2, "rank_pattern": {"w": 3})",
                                 R"(, "r": 3, "rank_pattern": {"v": 2})"}) {
    EXPECT_THAT(
        [&] {
          adapter_of({2, 3}, kDown, {4, 2}, kUp, more);
        },
        ThrowsError(ErrorKind::corruption,
                    "r, or rank_pattern: expected 2, as in the matrices, found 3"))
        << more;
  }
}

TEST(LoraTest, AProductThatOverflowsCountsAsTooLarge) {
  const auto merged = [](float down, reshard::OnOverflow on_overflow) {
    CombineOptions options;
    options.on_overflow = on_overflow;
    options.accumulation = Accumulation::float32;
    std::vector<LoraAdapter> adapters;
    adapters.push_back(adapter_of({1, 2}, {down, 1}, {2, 1}, {3e38F, 0}));
    return combined({{base_of({2, 2}, {{whole_box(Shape{2, 2}), 0}})}}, options,
                    std::move(adapters));
  };
  EXPECT_THAT([&] { elements<float>(*merged(-4, reshard::OnOverflow::refuse).reader, "w.weight"); },
              ThrowsError(ErrorKind::mismatch, "w.weight: cast: expected finite numbers"));
  constexpr float kLargest = std::numeric_limits<float>::max();
  EXPECT_THAT(elements<float>(*merged(-4, reshard::OnOverflow::saturate).reader, "w.weight"),
              ElementsAre(-kLargest, kLargest, 100, 100));
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_THAT(elements<float>(*merged(kInfinity, reshard::OnOverflow::saturate).reader, "w.weight"),
              ElementsAre(kInfinity, kLargest, testing::IsNan(), 100));
}

TEST(LoraTest, TheScaleMustBeANumberOfTheSum) {
  for (const auto& [more, accumulation, num_problems] :
       {std::tuple(R"(, "alpha_pattern": {"w": 1e60})", Accumulation::float32, 1U),
        std::tuple(R"(, "alpha_pattern": {"w": 1e-60})", Accumulation::float32, 1U),
        std::tuple(R"(, "alpha_pattern": {"w": 1e60})", Accumulation::float64, 0U),
        std::tuple(R"(, "alpha_pattern": {"w": 0})", Accumulation::float32, 0U)}) {
    CombineOptions options;
    options.accumulation = accumulation;
    std::vector<LoraAdapter> adapters;
    adapters.push_back(adapter_of({2, 3}, kDown, {4, 2}, kUp, more));
    const auto result =
        combined({{base_of({4, 3}, {{whole_box(Shape{4, 3}), 0}})}}, options, std::move(adapters));
    EXPECT_THAT(result.problems, SizeIs(num_problems)) << more;
  }
}

TEST(LoraTest, FewOfTheScalesMayHavePatterns) {
  std::string patterns = R"({"w0": 1)";
  for (int i = 1; i <= 10'000; ++i) {
    patterns += R"(, "w)" + std::to_string(i) + R"(": 1)";
  }
  EXPECT_THAT(
      [&] {
        adapter_of({2, 3}, kDown, {4, 2}, kUp, R"(, "alpha_pattern": )" + patterns + "}");
      },
      ThrowsError(ErrorKind::corruption, "alpha_pattern: expected at most 10000 entries"));
}

TEST(LoraTest, AllPatternsTogetherHaveALimit) {
  std::string patterns = R"({"w{3999}": 1)";
  for (int i = 0; i < 600; ++i) patterns += R"(, "w)" + std::to_string(i) + R"({3900}": 1)";
  EXPECT_THAT(
      [&] {
        adapter_of({2, 3}, kDown, {4, 2}, kUp, R"(, "alpha_pattern": )" + patterns + "}");
      },
      ThrowsError(ErrorKind::corruption, "alpha_pattern: expected regular expressions with at"));
}

TEST(LoraTest, AnAdapterHasTensors) {
  EXPECT_THAT(
      [] {
        read_lora_adapter(std::make_unique<MemoryCheckpoint>("adapter", 1),
                          R"({"peft_type": "LORA", "lora_alpha": 4})", "config", 1.0);
      },
      ThrowsError(ErrorKind::mismatch, "adapter: adapter: expected tensors"));
}

TEST(LoraTest, OnlyTheConfigurationTransposes) {
  std::vector<LoraAdapter> adapters;
  adapters.push_back(adapter_of({2, 3}, kDown, {4, 2}, kUp));
  const auto result =
      combined({{base_of({3, 4}, {{whole_box(Shape{3, 4}), 0}})}}, {}, std::move(adapters));
  EXPECT_THAT(texts(result.problems),
              ElementsAre(HasSubstr(
                  "w.weight: combine: expected fan_in_fan_out: true in adapter, "
                  "because only the transpose of the matrices fits, found false, or no such key")));
}

TEST(LoraTest, MatricesMustMakeTheWeight) {
  std::vector<LoraAdapter> adapters;
  adapters.push_back(adapter_of({2, 3}, kDown, {4, 2}, kUp));
  const auto result =
      combined({{base_of({5, 3}, {{whole_box(Shape{5, 3}), 0}})}}, {}, std::move(adapters));
  EXPECT_THAT(
      texts(result.problems),
      ElementsAre(HasSubstr("w.weight: combine: expected matrices whose product is float32 [5, "
                            "3], found float32 [4, 2] and float32 [2, 3]")));
}

TEST(CombinationTest, SumsThatAreTooLargeOrBecomeZeroAreCounted) {
  CombineOptions options;
  options.on_overflow = reshard::OnOverflow::infinity;
  options.losses = std::make_shared<RoundingLosses>();
  const auto result = combined(
      {{one_tensor<std::uint16_t>("a", DType::float16, {5}, {0, 0, 0, 0, 0}), {.weight = 1}},
       {one_tensor<float>("b", DType::float32, {5}, {1e-9F, -1e-9F, 7e4F, 1.0F, 0.0F}),
        {.weight = 1}}},
      options);
  EXPECT_THAT(options.losses->all(), IsEmpty());
  for (int i = 0; i < 2; ++i) elements<std::uint16_t>(*result.reader, "w");  // counted once
  const auto losses = options.losses->all();
  ASSERT_THAT(losses, SizeIs(1));
  const CastLosses& lost = losses.at("w");
  EXPECT_EQ(lost.num_became_zero, 2);
  EXPECT_EQ(lost.num_too_large, 1);
  EXPECT_EQ(lost.largest_magnitude, 7e4F);
}

TEST(CombinationTest, SumsBeyondTheAccumulationAreCountedAsTooLarge) {
  CombineOptions options;
  options.on_overflow = reshard::OnOverflow::infinity;
  options.losses = std::make_shared<RoundingLosses>();
  const auto result =
      combined({{one_tensor<float>("a", DType::float32, {2}, {3e38F, 1}), {.weight = 1}},
                {one_tensor<float>("b", DType::float32, {2}, {3e38F, 1}), {.weight = 1}}},
               options);
  elements<float>(*result.reader, "w");
  EXPECT_EQ(options.losses->all().at("w").num_too_large, 1);
}

TEST(CombinationTest, RefusesFloatsThatHaveNoSum) {
  const std::vector<std::pair<DType, std::string>> dtypes{
      {DType::float8_e4m3fnuz, "float8_e4m3fnuz (cast the source first)"},
      {DType::float8_e5m2fnuz, "float8_e5m2fnuz (cast the source first)"},
      {DType::float8_e8m0fnu, "float8_e8m0fnu (cast the source first)"},
      {DType::float4_e2m1fn_x2, "float4_e2m1fn_x2, which can only be copied"}};
  for (const auto& [dtype, found] : dtypes) {
    SCOPED_TRACE(found);
    const auto source = [&] { return one_tensor<std::uint8_t>("a", dtype, {2}, {0x40, 0x48}); };
    const std::string expected =
        "a: w: combine: expected a dtype that sums can be rounded to, found " + found;
    EXPECT_THAT(texts(combined({{source(), {.weight = 0.5}}}).problems), ElementsAre(expected));
    EXPECT_THAT(
        texts(combined({{source(), {.weight = 0.5}}, {source(), {.weight = 0.5}}}).problems),
        ElementsAre(expected));
    const auto copy = combined({{source(), {.weight = 1}}});
    EXPECT_THAT(copy.problems, IsEmpty());
    EXPECT_THAT(elements<std::uint8_t>(*copy.reader, "w"), ElementsAre(0x40, 0x48));
  }
}

}  // namespace
}  // namespace tessera::arithmetic
