#include "inspect/statistics.h"

#include <gmock/gmock.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>

#include "base/cast.h"
#include "support/memory_checkpoint.h"

namespace tessera::inspect {
namespace {

using test::MemoryCheckpoint;
using ::testing::ElementsAre;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <class T>
Statistics statistics_of(DType dtype, const std::vector<T>& values) {
  StatisticsAccumulator accumulator(dtype);
  const auto bytes = test::bytes_of(values);
  accumulator.add(bytes);
  return accumulator.statistics();
}

std::vector<float> gaussian(std::size_t count, float mean, float deviation) {
  std::mt19937 generator(7);
  std::normal_distribution<float> normal(mean, deviation);
  std::vector<float> values(count);
  for (float& value : values) value = normal(generator);
  return values;
}

TEST(StatisticsTest, OfAFewNumbersAreExact) {
  const auto s = statistics_of<float>(DType::float32, {1, 2, 3, 4, 0, -0.0F});
  EXPECT_EQ(s.numel, 6);
  EXPECT_EQ(s.num_zeros, 2);
  EXPECT_EQ(s.min, Number(0.0));
  EXPECT_EQ(s.max, Number(4.0));
  EXPECT_EQ(s.mean(), 10.0 / 6);
  EXPECT_NEAR(*s.standard_deviation(), 1.632993161855452, 1e-15);
}

TEST(StatisticsTest, OfNothingAreNothing) {
  const Statistics none;
  EXPECT_FALSE(none.mean());
  EXPECT_FALSE(none.standard_deviation());
  EXPECT_FALSE(none.min);
  const auto one = statistics_of<float>(DType::float32, {5});
  EXPECT_EQ(one.mean(), 5);
  EXPECT_FALSE(one.standard_deviation());
}

TEST(StatisticsTest, NumbersThatAreNotFiniteAreCountedAndLeftOut) {
  const auto s = statistics_of<double>(DType::float64, {kNan, 1, kInf, 3, -kInf, -kInf, -kNan});
  EXPECT_EQ(s.num_nan, 2);
  EXPECT_EQ(s.num_positive_inf, 1);
  EXPECT_EQ(s.num_negative_inf, 2);
  EXPECT_EQ(s.num_finite(), 2);
  EXPECT_EQ(s.min, Number(1.0));
  EXPECT_EQ(s.max, Number(3.0));
  EXPECT_EQ(s.mean(), 2);
  const auto all_nan = statistics_of<double>(DType::float64, {kNan, kNan});
  EXPECT_FALSE(all_nan.mean());
  EXPECT_FALSE(all_nan.max);
}

TEST(StatisticsTest, LargeFarOffNumbersLoseNoPrecision) {
  // The textbook formula E[x^2] - E[x]^2 gives 0 or less here.
  std::vector<double> values;
  for (int i = 0; i < 100000; ++i) values.push_back(1e9 + (i % 2));
  const auto s = statistics_of(DType::float64, values);
  EXPECT_EQ(s.mean(), 1e9 + 0.5);
  EXPECT_NEAR(*s.standard_deviation(), 0.5, 1e-5);
  const auto shifted = gaussian(200000, 1e6F, 1);
  long double sum = 0;
  for (float x : shifted) sum += x;
  const long double mean = sum / 200000;
  long double squares = 0;
  for (float x : shifted) squares += (x - mean) * (x - mean);
  const auto t = statistics_of(DType::float32, shifted);
  EXPECT_NEAR(*t.mean(), static_cast<double>(mean), 1e-9);
  EXPECT_NEAR(*t.standard_deviation(), static_cast<double>(std::sqrt(squares / 199999)), 1e-12);
}

TEST(StatisticsTest, SumsBeyondDoubleStayFinite) {
  const double huge = std::numeric_limits<double>::max();
  const auto s = statistics_of<double>(DType::float64, {huge, huge, huge, -huge});
  EXPECT_DOUBLE_EQ(*s.mean(), huge / 2);
  EXPECT_TRUE(std::isfinite(*s.standard_deviation()));
}

TEST(StatisticsTest, IntegersAreExactWhereFloatsAreNot) {
  const std::int64_t min = std::numeric_limits<std::int64_t>::min();
  const std::int64_t max = std::numeric_limits<std::int64_t>::max();
  const auto s = statistics_of<std::int64_t>(DType::int64, {max, max - 1, min, min + 1, 0});
  EXPECT_EQ(s.min, Number(min));
  EXPECT_EQ(s.max, Number(max));
  EXPECT_EQ(s.mean(), -2.0 / 5);
  EXPECT_EQ(s.num_zeros, 1);
  const std::uint64_t umax = std::numeric_limits<std::uint64_t>::max();
  const auto u = statistics_of<std::uint64_t>(DType::uint64, {umax, umax - 2});
  EXPECT_EQ(u.max, Number(umax));
  EXPECT_EQ(number_to_string(*u.max), "18446744073709551615");
  EXPECT_NEAR(*u.standard_deviation(), std::sqrt(2.0), 1e-15);
  const auto i = statistics_of<std::int32_t>(DType::int32, {-2147483647 - 1, 2147483647});
  EXPECT_EQ(i.min, Number(std::int64_t{-2147483648}));
  EXPECT_EQ(i.max, Number(std::int64_t{2147483647}));
}

TEST(StatisticsTest, EveryRealDtypeIsReadAsTheNumbersItHolds) {
  const std::vector<double> numbers = {-1.5, 0, 0.5, 2, 3};
  for (int code = 0; code < kNumDTypes; ++code) {
    const DType dtype = *dtype_from_code(static_cast<std::uint8_t>(code));
    if (!can_cast(DType::float64, dtype)) continue;
    SCOPED_TRACE(dtype_name(dtype));
    std::vector<std::byte> bytes(numbers.size() * itemsize(dtype));
    cast_elements(DType::float64, std::as_bytes(std::span(numbers)), dtype, bytes);
    StatisticsAccumulator accumulator(dtype);
    accumulator.add(bytes);
    const Statistics& s = accumulator.statistics();
    EXPECT_EQ(s.min, Number(-1.5));
    EXPECT_EQ(s.max, Number(3.0));
    EXPECT_EQ(s.num_zeros, 1);
    EXPECT_EQ(s.mean(), 0.8);
  }
}

TEST(StatisticsTest, SmallAndOddDtypesToo) {
  const auto boolean = statistics_of<std::uint8_t>(DType::boolean, {0, 1, 1, 1});
  EXPECT_EQ(boolean.mean(), 0.75);
  EXPECT_EQ(boolean.max, Number(std::int64_t{1}));
  const auto uint8 = statistics_of<std::uint8_t>(DType::uint8, {0, 255});
  EXPECT_EQ(uint8.max, Number(std::int64_t{255}));
  const auto int8 = statistics_of<std::uint8_t>(DType::int8, {0x80, 0x7F});
  EXPECT_EQ(int8.min, Number(std::int64_t{-128}));
  // 0x7F is NaN in e4m3fn and 0x7C infinity in e5m2.
  EXPECT_EQ(statistics_of<std::uint8_t>(DType::float8_e4m3fn, {0x7F, 0x38}).num_nan, 1);
  EXPECT_EQ(statistics_of<std::uint8_t>(DType::float8_e5m2, {0x7C, 0x3C}).num_positive_inf, 1);
  EXPECT_EQ(statistics_of<std::uint8_t>(DType::float8_e4m3fnuz, {0x80}).num_nan, 1);
  EXPECT_EQ(statistics_of<std::uint8_t>(DType::float8_e5m2fnuz, {0x80}).num_nan, 1);
  EXPECT_EQ(statistics_of<std::uint8_t>(DType::float8_e8m0fnu, {127, 128, 0xFF}).mean(), 1.5);
  // Two numbers in a byte: 6 and -0.5, then 0 and 1.
  const auto float4 = statistics_of<std::uint8_t>(DType::float4_e2m1fn_x2, {0x97, 0x20});
  EXPECT_EQ(float4.numel, 4);
  EXPECT_EQ(float4.num_zeros, 1);
  EXPECT_EQ(float4.min, Number(-0.5));
  EXPECT_EQ(float4.max, Number(6.0));
}

TEST(StatisticsTest, ComplexNumbersCountByMagnitude) {
  const auto s = statistics_of<float>(DType::complex64, {3, 4, 0, 0, -5, 12});
  EXPECT_EQ(s.numel, 3);
  EXPECT_EQ(s.num_zeros, 1);
  EXPECT_EQ(s.max, Number(13.0));
  EXPECT_EQ(s.mean(), 6);
  const auto nan = statistics_of<double>(DType::complex128, {kInf, kNan, kInf, 0});
  EXPECT_EQ(nan.num_nan, 1);
  EXPECT_EQ(nan.num_positive_inf, 1);
  const double huge = std::numeric_limits<double>::max();
  const auto finite = statistics_of<double>(DType::complex128, {huge, huge, kInf, -kInf});
  EXPECT_EQ(finite.num_positive_inf, 1);
  EXPECT_EQ(finite.max, Number(huge));
  EXPECT_EQ(statistics_of<std::uint16_t>(DType::complex32, {0x4200, 0x4400}).max, Number(5.0));
}

TEST(StatisticsTest, AreTheSameBitForBitHoweverTheTensorIsCutAndRead) {
  const std::int64_t rows = 900;
  const std::int64_t columns = 5000;  // more than one window of work
  auto values = gaussian(static_cast<std::size_t>(rows * columns), 0.1F, 3);
  values[12345] = std::nanf("");
  const auto whole = test::bytes_of(values);
  MemoryCheckpoint one;
  one.add({"t", DType::float32, {rows, columns}}, whole);
  MemoryCheckpoint many;
  many.add({"t", DType::float32, {rows, columns}}, whole,
           {{Box{{0, 0}, {rows, 1234}}, 0},
            {Box{{0, 1234}, {300, columns - 1234}}, 1},
            {Box{{300, 1234}, {600, columns - 1234}}, 2}});
  const std::size_t index = 0;
  ScanOptions alone;
  ScanOptions crowded;
  crowded.num_threads = 4;
  crowded.memory_nbytes = 1;  // makes each read as small as possible
  const Statistics a = compute_statistics(one, {&index, 1}, alone).front();
  const Statistics b = compute_statistics(many, {&index, 1}, crowded).front();
  EXPECT_EQ(a.sum, b.sum);
  EXPECT_EQ(a.squared_deviations_sum, b.squared_deviations_sum);
  EXPECT_EQ(a.num_nan, 1);
  EXPECT_EQ(b.num_nan, 1);
  EXPECT_EQ(a.min, b.min);
  EXPECT_EQ(a.max, b.max);
}

TEST(HistogramTest, OfManyTensorsAreThoseOfEachAlone) {
  auto values = gaussian(30'000, 1, 2);
  values[7] = std::nanf("");
  values[8] = std::numeric_limits<float>::infinity();
  MemoryCheckpoint checkpoint;
  checkpoint.add({"all_nan", DType::float32, {2}}, test::bytes_of<float>({std::nanf(""), NAN}));
  checkpoint.add({"bits", DType::int64, {4}}, test::bytes_of<std::int64_t>({3, 5, 5, 3}));
  checkpoint.add({"empty", DType::float32, {0}}, {});
  checkpoint.add({"normal", DType::float32, {100, 300}}, test::bytes_of(values),
                 {{Box{{0, 0}, {100, 17}}, 0}, {Box{{0, 17}, {100, 283}}, 1}});
  checkpoint.add({"same", DType::float32, {3}}, test::bytes_of<float>({4, 4, 4}));
  const std::vector<std::size_t> tensors = {0, 1, 2, 3, 4};
  const ScanOptions crowded{.num_threads = 3, .memory_nbytes = 1};
  const auto statistics = compute_statistics(checkpoint, tensors, {});
  const auto together = compute_histograms(checkpoint, tensors, statistics, 10, crowded);
  ASSERT_EQ(together.size(), tensors.size());
  for (std::size_t t : tensors) {
    SCOPED_TRACE(checkpoint.contents().tensors[t].meta.fqn);
    const Histogram alone = compute_histogram(checkpoint, t, statistics[t], 10, {});
    EXPECT_EQ(together[t].begin, alone.begin);
    EXPECT_EQ(together[t].end, alone.end);
    EXPECT_EQ(together[t].counts, alone.counts);
    EXPECT_EQ(std::accumulate(alone.counts.begin(), alone.counts.end(), std::int64_t{0}),
              statistics[t].num_finite());
  }
  EXPECT_TRUE(together[0].counts.empty());
  EXPECT_THAT(together[1].counts, ElementsAre(2, 0, 2));  // bins of whole width: 3, 4, 5
  EXPECT_TRUE(together[2].counts.empty());
  EXPECT_THAT(together[4].counts, ElementsAre(3));
}

TEST(StatisticsTest, MergeGivesTheStatisticsOfBoth) {
  auto a = statistics_of<float>(DType::float32, {1, 2, 3});
  a.merge(statistics_of<std::int64_t>(DType::int64, {10, -7}));
  EXPECT_EQ(a.min, Number(std::int64_t{-7}));
  EXPECT_EQ(a.max, Number(std::int64_t{10}));
  EXPECT_EQ(a.mean(), 9.0 / 5);
  EXPECT_NEAR(*a.standard_deviation(), 6.0580524923443839, 1e-14);
}

TEST(StatisticsTest, ATensorThatClaimsTheImpossibleCostsNothing) {
  MemoryCheckpoint checkpoint;
  formats::TensorEntry& entry = checkpoint.add({"t", DType::int8, {0}}, {});
  const std::int64_t numel = std::int64_t{1} << 62;
  entry.meta.shape = {numel};
  entry.pieces = {{FlatRange{0, numel}, 0}};
  const std::size_t index = 0;
  EXPECT_THROW(compute_statistics(checkpoint, {&index, 1}, {}),
               std::logic_error);  // thrown by MemoryCheckpoint
  entry.pieces = {{FlatRange{0, numel / 2}, 0}};
  EXPECT_THROW(compute_statistics(checkpoint, {&index, 1}, {}), Error);
}

TEST(StatisticsTest, ProgressSeesEveryByteAndAStopEndsTheWork) {
  MemoryCheckpoint checkpoint;
  checkpoint.add({"a", DType::float32, {100}}, test::bytes_of(std::vector<float>(100)));
  checkpoint.add({"b", DType::float32, {0}}, {});
  const std::vector<std::size_t> indices = {0, 1};
  std::uint64_t nbytes = 0;
  ScanOptions options;
  options.progress = [&](std::uint64_t n) { nbytes += n; };
  const auto statistics = compute_statistics(checkpoint, indices, options);
  EXPECT_EQ(nbytes, 400U);
  EXPECT_EQ(statistics[0].num_zeros, 100);
  EXPECT_EQ(statistics[1].numel, 0);
  std::stop_source source;
  source.request_stop();
  options.stop = source.get_token();
  EXPECT_THROW(compute_statistics(checkpoint, indices, options), Error);
}

Histogram histogram_of(DType dtype, const test::Bytes& bytes, std::int64_t numel, int bins) {
  MemoryCheckpoint checkpoint;
  checkpoint.add({"t", dtype, {numel}}, bytes);
  StatisticsAccumulator accumulator(dtype);
  accumulator.add(bytes);
  return compute_histogram(checkpoint, 0, accumulator.statistics(), bins, {});
}

TEST(HistogramTest, BinsAreHalfOpenButTheLast) {
  const auto h =
      histogram_of(DType::float32, test::bytes_of<float>({0, 0.9F, 1, 2, 3.9F, 4}), 6, 4);
  EXPECT_EQ(h.begin, 0);
  EXPECT_EQ(h.end, 4);
  EXPECT_THAT(h.counts, ElementsAre(2, 1, 1, 2));
}

TEST(HistogramTest, IntegersGetBinsOfWholeWidth) {
  const auto few = histogram_of(DType::int64, test::bytes_of<std::int64_t>({3, 4, 4, 5}), 4, 10);
  EXPECT_EQ(few.begin, 3);
  EXPECT_EQ(few.end, 6);
  EXPECT_THAT(few.counts, ElementsAre(1, 2, 1));
  std::vector<std::int32_t> values(100);
  std::iota(values.begin(), values.end(), 0);
  const auto many = histogram_of(DType::int32, test::bytes_of(values), 100, 8);
  EXPECT_EQ(many.end, 104);
  EXPECT_THAT(many.counts, ElementsAre(13, 13, 13, 13, 13, 13, 13, 9));
}

TEST(HistogramTest, EdgesDifferInNarrowRanges) {
  const double next = std::nextafter(1.0, 2.0);
  EXPECT_THAT(histogram_of(DType::float64, test::bytes_of<double>({1, next}), 2, 10).counts,
              ElementsAre(2));
  const auto narrow = histogram_of(DType::float64, test::bytes_of<double>({1, 1 + 0x1p-50}), 2, 10);
  EXPECT_THAT(narrow.counts, ElementsAre(1, 1));
  const std::int64_t big = std::int64_t{1} << 60;
  const auto integers =
      histogram_of(DType::int64, test::bytes_of<std::int64_t>({big, big + 1024}), 2, 10);
  EXPECT_THAT(integers.counts, ElementsAre(1, 1));
}

TEST(HistogramTest, DegenerateTensorsHaveDegenerateHistograms) {
  EXPECT_THAT(histogram_of(DType::float32, {}, 0, 4).counts, ElementsAre());
  EXPECT_THAT(histogram_of(DType::float32, test::bytes_of<float>({7, 7}), 2, 4).counts,
              ElementsAre(2));
  const double huge = std::numeric_limits<double>::max();
  EXPECT_THAT(
      histogram_of(DType::float64, test::bytes_of<double>({-huge, 0, huge, kInf, kNan}), 5, 2)
          .counts,
      ElementsAre(1, 2));
}

TEST(ElementTest, IsWrittenWithTheDigitsItsDtypeCanTellApart) {
  const auto text = [](DType dtype, auto value) {
    return element_to_string(dtype, test::bytes_of<decltype(value)>({value}));
  };
  EXPECT_EQ(text(DType::float32, 0.1F), "0.1");
  EXPECT_EQ(text(DType::float64, 0.1), "0.1");
  EXPECT_EQ(text(DType::float64, kInf), "inf");
  EXPECT_EQ(text(DType::bfloat16, std::uint16_t{0x3DCD}), "0.1001");
  EXPECT_EQ(text(DType::float16, std::uint16_t{0x2E66}), "0.099976");
  EXPECT_EQ(text(DType::float8_e4m3fn, std::uint8_t{0x1D}), "0.102");
  EXPECT_EQ(text(DType::float4_e2m1fn_x2, std::uint8_t{0xF1}), "0.5|-6");
  EXPECT_EQ(text(DType::boolean, std::uint8_t{1}), "true");
  EXPECT_EQ(text(DType::int8, std::uint8_t{0xFF}), "-1");
  EXPECT_EQ(text(DType::uint64, ~std::uint64_t{0}), "18446744073709551615");
  EXPECT_EQ(element_to_string(DType::complex64, test::bytes_of<float>({1.5F, -2})), "1.5-2j");
  EXPECT_EQ(element_to_string(DType::complex64, test::bytes_of<float>({0, 1})), "0+1j");
}

TEST(NumberTest, ComparesIntegersWithFloatsExactly) {
  const std::int64_t big = (std::int64_t{1} << 53) + 1;  // not a float64
  EXPECT_TRUE(less(Number(0x1p53), Number(big)));
  EXPECT_FALSE(less(Number(big), Number(0x1p53)));
  EXPECT_TRUE(less(Number(std::int64_t{-1}), Number(std::uint64_t{0})));
  EXPECT_TRUE(less(Number(std::int64_t{-3}), Number(-2.5)));
  EXPECT_TRUE(less(Number(-3.5), Number(std::int64_t{-3})));
  EXPECT_TRUE(less(Number(~std::uint64_t{0}), Number(0x1p64)));
  EXPECT_TRUE(less(Number(-1e300), Number(std::uint64_t{0})));
}

}  // namespace
}  // namespace tessera::inspect
