#include "inspect/diff.h"

#include <gmock/gmock.h>

#include <bit>
#include <cmath>
#include <complex>
#include <cstdint>
#include <limits>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "support/memory_checkpoint.h"

namespace tessera::inspect {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Kind = Difference::Kind;
using test::MemoryCheckpoint;

std::vector<float> ramp(int numel) {
  std::vector<float> values;
  for (int i = 0; i < numel; ++i) values.push_back(static_cast<float>(i));
  return values;
}

MemoryCheckpoint holding(const std::vector<float>& values, Shape shape,
                         std::vector<formats::Piece> pieces = {}) {
  MemoryCheckpoint checkpoint;
  checkpoint.add({"t", DType::float32, std::move(shape)}, test::bytes_of(values),
                 std::move(pieces));
  return checkpoint;
}

DiffReport diff_values(const std::vector<float>& a, const std::vector<float>& b,
                       std::optional<double> rtol = {}, std::optional<double> atol = {}) {
  DiffOptions options;
  options.rtol = rtol;
  options.atol = atol;
  const auto size = static_cast<std::int64_t>(a.size());
  return diff(holding(a, {size}), holding(b, {size}), options);
}

TEST(DiffTest, EqualStateInDifferentShardingsDoesNotDiffer) {
  const auto values = ramp(24);
  const auto a = holding(values, {4, 6});
  const auto b = holding(values, {4, 6}, {{Box{{0, 0}, {4, 5}}, 0}, {Box{{0, 5}, {4, 1}}, 1}});
  const DiffReport report = diff(a, b, {});
  EXPECT_THAT(report.differences, IsEmpty());
  EXPECT_EQ(report.num_tensors_compared, 1);
  EXPECT_EQ(report.nbytes_compared, 96U);
  EXPECT_EQ(diff_nbytes(a, b, {}), 192U);
}

TEST(DiffTest, NamesTheFirstElementThatDiffersAndCountsAll) {
  auto changed = ramp(24);
  changed[8] += 0.5F;
  changed[23] -= 2;
  const auto a = holding(ramp(24), {4, 6});
  const auto b = holding(changed, {4, 6}, {{FlatRange{0, 7}, 0}, {FlatRange{7, 24}, 1}});
  const DiffReport report = diff(a, b, {});
  ASSERT_EQ(report.differences.size(), 1U);
  EXPECT_EQ(report.differences[0].kind, Kind::elements);
  EXPECT_EQ(report.differences[0].name, "t");
  const ElementDifferences& elements = *report.differences[0].elements;
  EXPECT_EQ(elements.numel, 24);
  EXPECT_EQ(elements.num_different, 2);
  EXPECT_THAT(elements.first_index, ElementsAre(1, 2));
  EXPECT_EQ(elements.first_a, "8");
  EXPECT_EQ(elements.first_b, "8.5");
  EXPECT_EQ(elements.max_abs_difference, 2);
}

TEST(DiffTest, FindsADifferenceInAnyBlockOfALargeTensor) {
  const std::int64_t numel = (std::int64_t{1} << 21) + 50000;
  std::vector<float> a(static_cast<std::size_t>(numel), 1);
  for (std::int64_t at : {std::int64_t{0}, std::int64_t{8192}, (std::int64_t{1} << 21) - 1,
                          std::int64_t{1} << 21, numel - 1}) {
    auto b = a;
    b[static_cast<std::size_t>(at)] = 2;
    DiffOptions options;
    options.scan.num_threads = 3;
    options.scan.memory_nbytes = 1;
    const DiffReport report = diff(holding(a, {numel}), holding(b, {numel}), options);
    ASSERT_EQ(report.differences.size(), 1U);
    EXPECT_THAT(report.differences[0].elements->first_index, ElementsAre(at));
    EXPECT_EQ(report.differences[0].elements->num_different, 1);
  }
}

TEST(DiffTest, WithoutATolerancesElementsAreComparedBitForBit) {
  const float nan = std::nanf("");
  const float other_nan = std::nanf("1");
  EXPECT_THAT(diff_values({nan}, {nan}).differences, IsEmpty());
  EXPECT_EQ(diff_values({nan}, {other_nan}).differences.size(), 1U);
  const auto zero = diff_values({0.0F}, {-0.0F}).differences;
  ASSERT_EQ(zero.size(), 1U);
  EXPECT_EQ(zero[0].elements->max_abs_difference, 0);
  const auto one_nan = diff_values({nan, 1}, {1, 1}).differences;
  ASSERT_EQ(one_nan.size(), 1U);
  EXPECT_EQ(one_nan[0].elements->num_nan_on_one_side, 1);
  EXPECT_EQ(one_nan[0].elements->max_abs_difference, std::nullopt);
}

TEST(DiffTest, WithoutATolerancesValuesAreComparedBitForBit) {
  const auto num_differences = [](double a, double b, const DiffOptions& options) {
    const auto with = [](double number) {
      MemoryCheckpoint checkpoint;
      checkpoint.add_value("lr", Value::List{number});
      return checkpoint;
    };
    return diff(with(a), with(b), options).differences.size();
  };
  EXPECT_EQ(num_differences(0.0, -0.0, {}), 1U);
  EXPECT_EQ(num_differences(std::nan("1"), std::nan("1"), {}), 0U);
  EXPECT_EQ(num_differences(0.0, -0.0, {.rtol = 0, .atol = 0}), 0U);
  EXPECT_EQ(num_differences(1.0, 2.0, {.rtol = 9, .atol = 9}), 1U);
}

TEST(DiffTest, TolerancesAreThoseOfAllclose) {
  const float inf = std::numeric_limits<float>::infinity();
  const float nan = std::nanf("");
  EXPECT_THAT(diff_values({1.0F}, {1.25F}, 0, 0.25).differences, IsEmpty());
  EXPECT_EQ(diff_values({1.0F}, {1.25F}, 0, 0.2).differences.size(), 1U);
  EXPECT_THAT(diff_values({100}, {101}, 0.01, 0).differences, IsEmpty());
  EXPECT_EQ(diff_values({101}, {100}, 0.0099, 0).differences.size(), 1U);
  EXPECT_THAT(diff_values({nan, inf, 0.0F}, {std::nanf("1"), inf, -0.0F}, 0, 1e-9).differences,
              IsEmpty());
  EXPECT_EQ(diff_values({inf}, {-inf}, 0.5, 0).differences.size(), 1U);
  EXPECT_EQ(diff_values({1}, {inf}, 0.5, 0).differences.size(), 1U);
  EXPECT_EQ(diff_values({1}, {nan}, 0.5, 1e9).differences.size(), 1U);
}

TEST(DiffTest, AToleranceOfZeroComparesNumbersAndNotBits) {
  const std::vector<float> a = {0.0F, 1.0F, std::nanf("")};
  const std::vector<float> b = {-0.0F, 1.0F, std::nanf("1")};
  EXPECT_EQ(diff_values(a, b).differences.size(), 1U);
  EXPECT_THAT(diff_values(a, b, 0).differences, IsEmpty());
  EXPECT_THAT(diff_values(a, b, {}, 0).differences, IsEmpty());
  EXPECT_THAT(diff_values(a, b, 0, 0).differences, IsEmpty());
  EXPECT_EQ(diff_values({1.0F}, {std::nextafter(1.0F, 2.0F)}, 0, 0).differences.size(), 1U);
}

TEST(DiffTest, LargeIntegersAreComparedExactly) {
  const std::int64_t big = std::int64_t{1} << 60;
  MemoryCheckpoint a;
  a.add({"t", DType::int64, {3}},
        test::bytes_of<std::int64_t>({big, 5, std::numeric_limits<std::int64_t>::min()}));
  MemoryCheckpoint b;
  b.add({"t", DType::int64, {3}},
        test::bytes_of<std::int64_t>({big + 1, 5, std::numeric_limits<std::int64_t>::max()}));
  const auto differences = diff(a, b, {}).differences;
  ASSERT_EQ(differences.size(), 1U);
  EXPECT_EQ(differences[0].elements->num_different, 2);
  EXPECT_EQ(differences[0].elements->first_b, "1152921504606846977");
  EXPECT_EQ(differences[0].elements->max_abs_difference, 0x1p64);
  DiffOptions options;
  options.atol = 1;
  EXPECT_EQ(diff(a, b, options).differences[0].elements->num_different, 1);
}

TEST(DiffTest, ComplexNumbersDifferByTheMagnitudeOfTheirDifference) {
  MemoryCheckpoint a;
  a.add({"t", DType::complex64, {2}}, test::bytes_of<float>({3, 4, 1, 1}));
  MemoryCheckpoint b;
  b.add({"t", DType::complex64, {2}}, test::bytes_of<float>({4, 3, 1, 1}));  // equal magnitude
  const auto differences = diff(a, b, {}).differences;
  ASSERT_EQ(differences.size(), 1U);
  EXPECT_EQ(differences[0].elements->first_a, "3+4j");
  EXPECT_EQ(differences[0].elements->max_abs_difference, std::sqrt(2.0));
}

// The expectations are what torch.allclose(a, b, rtol, atol, equal_nan=True) returns.
TEST(DiffTest, TolerancesOfComplexNumbersAreThoseOfAllclose) {
  using Complex = std::complex<double>;
  const double inf = std::numeric_limits<double>::infinity();
  const double nan = std::nan("");
  const auto are_close = [](Complex x, Complex y, double rtol, double atol) {
    MemoryCheckpoint a;
    MemoryCheckpoint b;
    a.add({"t", DType::complex128, {1}}, test::bytes_of<Complex>({x}));
    b.add({"t", DType::complex128, {1}}, test::bytes_of<Complex>({y}));
    return diff(a, b, {.rtol = rtol, .atol = atol}).differences.empty();
  };
  EXPECT_TRUE(are_close({100, 0.001}, {100, 0.002}, 1e-4, 0));  // small beside the real part
  EXPECT_FALSE(are_close({0.9, 0.9}, {0, 0}, 0, 1));
  EXPECT_TRUE(are_close({0.6, 0.8}, {0, 0}, 0, 1));
  EXPECT_TRUE(are_close({1.7e308, 1.7e308}, {1.7e308, 1.6e308}, 0.1, 0));
  EXPECT_TRUE(are_close({nan, 1}, {2, nan}, 0, 0));
  EXPECT_FALSE(are_close({nan, 1}, {1, 1}, 0, 1e9));
  EXPECT_TRUE(are_close({inf, 1}, {inf, 1}, 0, 0));
  EXPECT_FALSE(are_close({inf, 1}, {inf, 2}, 0, 1e9));
  EXPECT_FALSE(are_close({1, 1}, {inf, 1}, 0.5, 0));
}

TEST(DiffTest, ReportsNamesShapesDtypesAndValuesInOrder) {
  const auto bytes = test::bytes_of<float>({1, 2});
  MemoryCheckpoint a;
  a.add({"a.only", DType::float32, {2}}, bytes);
  a.add({"dtype", DType::float32, {2}}, bytes);
  a.add({"shape", DType::float32, {2}}, bytes);
  a.add({"turned", DType::float32, {2}}, bytes);
  a.add_value("lr", Value(0.1));
  a.add_value("same", Value(7));
  MemoryCheckpoint b;
  b.add({"b.only", DType::float32, {2}}, bytes);
  b.add({"dtype", DType::int32, {2}}, bytes);
  b.add({"shape", DType::float32, {2, 1}}, bytes);
  b.add_value("lr", Value(0.2));
  b.add_value("same", Value(7));
  b.add_value("turned", Value("now a value"));
  const DiffReport report = diff(a, b, {});
  std::vector<std::pair<Kind, std::string>> found;
  for (const auto& d : report.differences) found.emplace_back(d.kind, d.name);
  EXPECT_THAT(found,
              ElementsAre(std::pair(Kind::missing, "a.only"), std::pair(Kind::extra, "b.only"),
                          std::pair(Kind::dtype, "dtype"), std::pair(Kind::value, "lr"),
                          std::pair(Kind::shape, "shape"), std::pair(Kind::type, "turned")));
  EXPECT_EQ(report.differences[0].a, "float32 [2]");
  EXPECT_EQ(report.differences[0].b, "");
  EXPECT_EQ(report.differences[3].a, "0.1");
  EXPECT_EQ(report.num_values_compared, 2);
  EXPECT_EQ(report.num_tensors_compared, 2);
}

TEST(DiffTest, AnyDtypesAreComparedAsNumbersWhenAsked) {
  MemoryCheckpoint a;
  a.add({"t", DType::float32, {3}}, test::bytes_of<float>({1, 0.100098F, 3}));
  MemoryCheckpoint b;
  b.add({"t", DType::bfloat16, {3}}, test::bytes_of<std::uint16_t>({0x3F80, 0x3DCD, 0x4000}));
  DiffOptions options;
  options.dtypes = DiffOptions::DTypes::any;
  options.rtol = 1e-3;
  const auto differences = diff(a, b, options).differences;
  ASSERT_EQ(differences.size(), 1U);
  EXPECT_EQ(differences[0].elements->num_different, 1);
  EXPECT_EQ(differences[0].elements->first_a, "3");
  EXPECT_EQ(differences[0].elements->first_b, "2");
}

// The bytes of float4 are the numbers 0.5 and 0, then 1 and 0.
TEST(DiffTest, TwoNumbersInAByteAreNotComparedWithOtherDtypes) {
  MemoryCheckpoint packed;
  packed.add({"t", DType::float4_e2m1fn_x2, {2}}, test::bytes_of<std::uint8_t>({0x01, 0x02}));
  MemoryCheckpoint real;
  real.add({"t", DType::float32, {2}}, test::bytes_of<float>({0.5F, 1}));
  MemoryCheckpoint complex;
  complex.add({"t", DType::complex64, {2}}, test::bytes_of<float>({0.5F, 0, 1, 0}));
  DiffOptions options;
  options.dtypes = DiffOptions::DTypes::any;
  for (const MemoryCheckpoint* other : {&real, &complex}) {
    const auto differences = diff(packed, *other, options).differences;
    ASSERT_EQ(differences.size(), 1U);
    EXPECT_EQ(differences[0].kind, Difference::Kind::dtype);
  }
  EXPECT_THAT(diff(packed, packed, options).differences, IsEmpty());
}

// One line for each name: `head: <target in A> | <target in B>`.
std::vector<std::string> ties_of(const DiffReport& report) {
  std::vector<std::string> lines;
  for (const Untied& each : report.untied) {
    lines.push_back(each.name + ": " + each.target_a + " | " + each.target_b);
  }
  return lines;
}

TEST(DiffTest, ATiedTensorEqualsOneOfItsOwn) {
  const auto bytes = test::bytes_of<float>({1, 2});
  MemoryCheckpoint tied;
  tied.add({"emb", DType::float32, {2}}, bytes);
  tied.add_alias("head", "emb");
  MemoryCheckpoint apart;
  apart.add({"emb", DType::float32, {2}}, bytes);
  apart.add({"head", DType::float32, {2}}, bytes);
  const DiffReport report = diff(tied, apart, {});
  EXPECT_THAT(report.differences, IsEmpty());
  EXPECT_THAT(ties_of(report), ElementsAre("head: emb | "));
  EXPECT_THAT(diff(tied, tied, {}).untied, IsEmpty());
  apart.piece_bytes("head", 0)[0] = std::byte{1};
  EXPECT_EQ(diff(tied, apart, {}).differences.size(), 1U);
}

TEST(DiffTest, OtherKeysOfANameAreToldThoughTheNamesAreEqual) {
  const auto keyed = [](const formats::KeyPath& path) {
    MemoryCheckpoint checkpoint;
    formats::TensorEntry& tensor =
        checkpoint.add({formats::spell(path), DType::float32, {2}}, test::bytes_of<float>({1, 2}));
    if (path.size() > 1) tensor.key_path = path;
    return checkpoint;
  };
  const auto other_keys = [&](const formats::KeyPath& a, const formats::KeyPath& b,
                              const DiffOptions& options = {}) {
    const DiffReport report = diff(keyed(a), keyed(b), options);
    EXPECT_THAT(report.differences, IsEmpty());
    std::vector<std::string> lines;
    for (const OtherKeys& each : report.other_keys) {
      lines.push_back(each.name + ": " + each.keys_a + " != " + each.keys_b);
    }
    return lines;
  };
  const formats::Key zero = formats::NonStringKey{"0"};
  EXPECT_THAT(other_keys({"s", zero}, {"s", "0"}), ElementsAre(R"(s.0: ["s"][0] != ["s"]["0"])"));
  EXPECT_THAT(other_keys({"s", std::int64_t{0}}, {"s", zero}),
              ElementsAre(R"(s.0: ["s"][item 0] != ["s"][0])"));
  EXPECT_THAT(other_keys({"a.b"}, {"a", "b"}), ElementsAre(R"(a.b: ["a.b"] != ["a"]["b"])"));
  EXPECT_THAT(other_keys({"s", zero}, {"s", zero}), IsEmpty());
  EXPECT_THAT(other_keys({"s", zero}, {"t", "0"}, {.renames = {{"s", "t"}}}), IsEmpty());
}

TEST(DiffTest, ATieToAnotherTensorIsToldThoughTheBytesAreEqual) {
  const auto bytes = test::bytes_of<float>({1, 2});
  const auto tied_to = [&](const std::string& alias, const std::string& target,
                           const std::string& other) {
    MemoryCheckpoint checkpoint;
    for (const std::string& fqn : std::set{target, other}) {
      checkpoint.add({fqn, DType::float32, {2}}, bytes);
    }
    checkpoint.add_alias(alias, target);
    return checkpoint;
  };
  const DiffReport moved = diff(tied_to("a", "x", "y"), tied_to("a", "y", "x"), {});
  EXPECT_THAT(moved.differences, IsEmpty());
  EXPECT_THAT(ties_of(moved), ElementsAre("a: x | y"));
  // The same tie, but another of its names is the tensor.
  EXPECT_THAT(diff(tied_to("a", "x", "y"), tied_to("x", "a", "y"), {}).untied, IsEmpty());
  const DiffOptions renames{.renames = {{"x", "w"}}};
  EXPECT_THAT(diff(tied_to("a", "x", "y"), tied_to("a", "w", "y"), renames).untied, IsEmpty());
}

TEST(DiffTest, WhatPrintsAlikeIsShownWithItsBytes) {
  MemoryCheckpoint a;
  MemoryCheckpoint b;
  a.add({"flag", DType::boolean, {2}}, test::bytes_of<std::uint8_t>({0, 2}));
  b.add({"flag", DType::boolean, {2}}, test::bytes_of<std::uint8_t>({0, 1}));
  a.add({"nan", DType::float32, {1}}, test::bytes_of<std::uint32_t>({0x7fc00001}));
  b.add({"nan", DType::float32, {1}}, test::bytes_of<std::uint32_t>({0x7fc00000}));
  const DiffReport report = diff(a, b, {});
  ASSERT_EQ(report.differences.size(), 2U);
  EXPECT_EQ(report.differences[0].elements->first_a, "true (0x02)");
  EXPECT_EQ(report.differences[0].elements->first_b, "true (0x01)");
  EXPECT_EQ(report.differences[1].elements->first_a, "nan (0x7fc00001)");
  EXPECT_EQ(report.differences[1].elements->first_b, "nan (0x7fc00000)");
}

std::pair<std::string, std::string> diff_of_values(Value a, Value b) {
  MemoryCheckpoint with_a;
  MemoryCheckpoint with_b;
  with_a.add_value("v", std::move(a));
  with_b.add_value("v", std::move(b));
  const DiffReport report = diff(with_a, with_b, {});
  if (report.differences.size() != 1) return {};
  return {report.differences[0].a, report.differences[0].b};
}

TEST(DiffTest, ValuesThatPrintAlikeAreShownAtTheFirstDifference) {
  using ::testing::Pair;
  const auto nan = [](std::uint64_t payload) {
    return Value(std::bit_cast<double>(std::uint64_t{0x7ff8000000000000} + payload));
  };
  EXPECT_THAT(diff_of_values(nan(0), nan(1)),
              Pair("nan (0x7ff8000000000000)", "nan (0x7ff8000000000001)"));
  const auto nested = [&](std::uint64_t payload) {
    return Value(Value::Dict{{"lr", 1}, {"betas", Value::Tuple{{0, nan(payload)}}}});
  };
  EXPECT_THAT(diff_of_values(nested(0), nested(1)),
              Pair("at ['betas'][1]: nan (0x7ff8000000000000)",
                   "at ['betas'][1]: nan (0x7ff8000000000001)"));
  const auto text = [](char changed) {
    std::string made(402, 'z');
    made[400] = changed;
    return made;
  };
  EXPECT_THAT(diff_of_values(text('a'), text('b')),
              Pair(::testing::EndsWith(" (402 bytes, from byte 400: b'az')"),
                   ::testing::EndsWith(" (402 bytes, from byte 400: b'bz')")));
  EXPECT_THAT(diff_of_values(Value::List(300, 1), Value::List(301, 1)),
              Pair(::testing::EndsWith(" (list of 300)"), ::testing::EndsWith(" (list of 301)")));
}

TEST(DiffTest, KeysAndItemsOfSetsThatPrintAlikeAreShown) {
  using ::testing::Pair;
  const std::string text(400, 'x');
  const auto dict = [&](const char* second) {
    return Value(Value::Tuple{{Value::Dict{{"a", text}, {second, 1}}}});
  };
  EXPECT_THAT(diff_of_values(dict("b"), dict("c")),
              Pair("at [0](key 1): 'b'", "at [0](key 1): 'c'"));
  const auto set = [&](const char* second) { return Value(Value::Set{{text, second}}); };
  EXPECT_THAT(diff_of_values(set("b"), set("c")), Pair("at (item 1): 'b'", "at (item 1): 'c'"));
}

// 2^53 + 1 is the first integer that float64 rounds, to 2^53.
TEST(DiffTest, LargeIntegersOfTwoDTypesAreNotRounded) {
  constexpr std::int64_t kLarge = std::int64_t{1} << 53;
  MemoryCheckpoint a;
  MemoryCheckpoint b;
  a.add({"u", DType::int64, {3}}, test::bytes_of<std::int64_t>({kLarge, kLarge + 1, -1}));
  b.add({"u", DType::uint64, {3}},
        test::bytes_of<std::uint64_t>({kLarge, kLarge, std::uint64_t(-1)}));
  a.add({"v", DType::float64, {1}}, test::bytes_of<double>({0x1p53}));
  b.add({"v", DType::int64, {1}}, test::bytes_of<std::int64_t>({kLarge + 1}));
  DiffOptions options;
  options.dtypes = DiffOptions::DTypes::any;
  const auto differences = diff(a, b, options).differences;
  ASSERT_EQ(differences.size(), 2U);
  EXPECT_EQ(differences[0].elements->num_different, 2);
  EXPECT_EQ(differences[0].elements->first_a, "9007199254740993");
  EXPECT_EQ(differences[0].elements->first_b, "9007199254740992");
  EXPECT_EQ(differences[0].elements->max_abs_difference, 0x1p64);
  EXPECT_EQ(differences[1].elements->max_abs_difference, 1);
}

TEST(DiffTest, ComparesOnlyTheNamesAskedFor) {
  MemoryCheckpoint a;
  a.add({"model.w", DType::float32, {1}}, test::bytes_of<float>({1}));
  a.add({"optim.w", DType::float32, {1}}, test::bytes_of<float>({1}));
  MemoryCheckpoint b;
  b.add({"model.w", DType::float32, {1}}, test::bytes_of<float>({1}));
  DiffOptions options;
  options.names = NameSelection({"model"});
  EXPECT_THAT(diff(a, b, options).differences, IsEmpty());
  EXPECT_EQ(diff(a, b, {}).differences.size(), 1U);
}

/// A checkpoint whose rank 1 has its own `rng`; `prefix` is before both names.
MemoryCheckpoint with_own_rng(const std::string& prefix, std::int64_t of_rank_1) {
  MemoryCheckpoint checkpoint("checkpoint", 2);
  checkpoint.add_value("per_rank.1." + prefix + "rng", Value(of_rank_1));
  checkpoint.add_value(prefix + "rng", Value(0));
  return checkpoint;
}

TEST(DiffTest, PatternsAndRenamesApplyToTheEntriesOfRanks) {
  const DiffReport report =
      diff(with_own_rng("", 1), with_own_rng("", 2), {.names = NameSelection({"rng"})});
  ASSERT_EQ(report.differences.size(), 1U);
  EXPECT_EQ(report.differences[0].name, "per_rank.1.rng");

  const DiffReport renamed =
      diff(with_own_rng("", 1), with_own_rng("run.", 1), {.renames = {{"", "run."}}});
  EXPECT_THAT(renamed.differences, IsEmpty());
  EXPECT_EQ(renamed.num_values_compared, 2);
}

TEST(DiffTest, AnUnreadableSideIsAnErrorNotADifference) {
  MemoryCheckpoint a = holding(ramp(4), {4});
  MemoryCheckpoint b = holding(ramp(4), {4});
  b.fail_reads_of("t", 0);
  EXPECT_THROW(diff(a, b, {}), Error);
}

}  // namespace
}  // namespace tessera::inspect
