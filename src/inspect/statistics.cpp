#include "inspect/statistics.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/byte_buffer.h"
#include "formats/read_announcement.h"
#include "inspect/scan.h"
#include "tessera/base/error.h"
#include "tessera/inspect/tensor_reader.h"

namespace tessera::inspect {
namespace {

// [Note: Lanes] Loops over a block compute this many partial results side by side and combine them
// at the end. A compiler must not reorder floating-point sums, but it can compute separate partial
// results in one vector register. The order of additions is the same on every machine.
constexpr std::size_t kLanes = 16;

template <class Real>
struct BlockSums {
  Real min;
  Real max;
  double sum;
  std::int64_t num_zeros;
};

// Returns the minimum, the maximum, the sum and the number of zeros. Requires: at least one number;
// all are finite.
template <class Real>
BlockSums<Real> sum_block(const Real* numbers, std::size_t count) {
  std::array<Real, kLanes> min;
  std::array<Real, kLanes> max;
  std::array<double, kLanes> sum{};
  std::array<std::int32_t, kLanes> zeros{};
  min.fill(numbers[0]);
  max.fill(numbers[0]);
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const Real x = numbers[i + lane];
      min[lane] = x < min[lane] ? x : min[lane];
      max[lane] = x > max[lane] ? x : max[lane];
      sum[lane] += static_cast<double>(x);
      zeros[lane] += x == 0 ? 1 : 0;
    }
  }
  for (std::size_t lane = 0; i < count; ++i, ++lane) {
    const Real x = numbers[i];
    min[lane] = std::min(min[lane], x);
    max[lane] = std::max(max[lane], x);
    sum[lane] += static_cast<double>(x);
    zeros[lane] += x == 0 ? 1 : 0;
  }
  BlockSums<Real> sums{min[0], max[0], sum[0], zeros[0]};
  for (std::size_t lane = 1; lane < kLanes; ++lane) {
    sums.min = std::min(sums.min, min[lane]);
    sums.max = std::max(sums.max, max[lane]);
    sums.sum += sum[lane];
    sums.num_zeros += zeros[lane];
  }
  return sums;
}

template <class Real>
double sum_squared_deviations(const Real* numbers, std::size_t count, double mean) {
  std::array<double, kLanes> sum{};
  std::size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const double deviation = static_cast<double>(numbers[i + lane]) - mean;
      sum[lane] += deviation * deviation;
    }
  }
  for (std::size_t lane = 0; i < count; ++i, ++lane) {
    const double deviation = static_cast<double>(numbers[i]) - mean;
    sum[lane] += deviation * deviation;
  }
  double total = 0;
  for (double lane : sum) total += lane;
  return total;
}

template <class Wide, class Number>
Wide sum_wide(const Number* numbers, std::size_t count) {
  Wide sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += static_cast<Wide>(numbers[i]);
  return sum;
}

template <class Number>
long double squared_deviations_wide(const Number* numbers, std::size_t count, long double mean) {
  long double sum = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const long double deviation = static_cast<long double>(numbers[i]) - mean;
    sum += deviation * deviation;
  }
  return sum;
}

bool any_not_finite(const float* numbers, std::size_t count) {
  std::uint32_t any = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto exponent = std::bit_cast<std::uint32_t>(numbers[i]) & 0x7F800000U;
    any |= exponent == 0x7F800000U ? 1U : 0U;
  }
  return any != 0;
}

bool any_not_finite(const double* numbers, std::size_t count) {
  std::uint64_t any = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto exponent = std::bit_cast<std::uint64_t>(numbers[i]) & 0x7FF0000000000000U;
    any |= exponent == 0x7FF0000000000000U ? 1U : 0U;
  }
  return any != 0;
}

// Moves the finite numbers to the front, and counts NaNs and infinities in `block`. Returns how
// many numbers are finite.
template <class Real>
std::size_t take_out_not_finite(Real* numbers, std::size_t count, Statistics& block) {
  std::size_t kept = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Real x = numbers[i];
    if (std::isnan(x)) {
      ++block.num_nan;
    } else if (std::isinf(x)) {
      ++(x > 0 ? block.num_positive_inf : block.num_negative_inf);
    } else {
      numbers[kept++] = x;
    }
  }
  return kept;
}

Number exact_number(double value, DType dtype) {
  const bool is_integer = !is_floating_point(dtype) && !is_complex(dtype);
  if (is_integer) return static_cast<std::int64_t>(value);
  return value;
}

// Returns statistics of `numbers`. Overwrites `numbers`.
template <class Real>
Statistics block_statistics(Real* numbers, std::size_t count, DType dtype) {
  Statistics block;
  block.numel = static_cast<std::int64_t>(count);
  if (any_not_finite(numbers, count)) count = take_out_not_finite(numbers, count, block);
  if (count == 0) return block;
  const BlockSums<Real> sums = sum_block(numbers, count);
  block.num_zeros = sums.num_zeros;
  // Adding zero turns -0 into 0. Otherwise the sign would depend on which of the two zeros was
  // found first.
  block.min = exact_number(static_cast<double>(sums.min) + 0.0, dtype);
  block.max = exact_number(static_cast<double>(sums.max) + 0.0, dtype);
  block.sum = std::isfinite(sums.sum) ? static_cast<long double>(sums.sum)
                                      : sum_wide<long double>(numbers, count);
  const long double mean = block.sum / static_cast<long double>(count);
  block.squared_deviations_sum =
      static_cast<long double>(sum_squared_deviations(numbers, count, static_cast<double>(mean)));
  if (!std::isfinite(block.squared_deviations_sum)) {
    block.squared_deviations_sum = squared_deviations_wide(numbers, count, mean);
  }
  return block;
}

template <class Integer>
Statistics integer_block_statistics(const Integer* numbers, std::size_t count) {
  Statistics block;
  block.numel = static_cast<std::int64_t>(count);
  block.num_zeros = std::count(numbers, numbers + count, Integer{0});
  const auto [min, max] = std::minmax_element(numbers, numbers + count);
  block.min = *min;
  block.max = *max;
  block.sum = sum_wide<long double>(numbers, count);
  block.squared_deviations_sum =
      squared_deviations_wide(numbers, count, block.sum / static_cast<long double>(count));
  return block;
}

template <class Number>
void copy_numbers(std::span<const std::byte> bytes, std::span<Number> out) {
  std::memcpy(out.data(), bytes.data(), bytes.size());
}

}  // namespace

std::optional<double> Statistics::mean() const {
  if (num_finite() == 0) return std::nullopt;
  return static_cast<double>(sum / static_cast<long double>(num_finite()));
}

std::optional<double> Statistics::standard_deviation() const {
  if (num_finite() < 2) return std::nullopt;
  return static_cast<double>(
      std::sqrt(squared_deviations_sum / static_cast<long double>(num_finite() - 1)));
}

// The deviations are merged as in Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm
// for Computing Sample Variances" (1979), equation 2.1b.
void Statistics::merge(const Statistics& other) {
  const auto n = static_cast<long double>(num_finite());
  const auto m = static_cast<long double>(other.num_finite());
  if (n > 0 && m > 0) {
    const long double distance = other.sum / m - sum / n;
    squared_deviations_sum +=
        other.squared_deviations_sum + distance * distance * (n * m / (n + m));
  } else {
    squared_deviations_sum += other.squared_deviations_sum;
  }
  sum += other.sum;
  numel += other.numel;
  num_zeros += other.num_zeros;
  num_nan += other.num_nan;
  num_positive_inf += other.num_positive_inf;
  num_negative_inf += other.num_negative_inf;
  if (other.min && (!min || less(*other.min, *min))) min = other.min;
  if (other.max && (!max || less(*max, *other.max))) max = other.max;
}

void StatisticsAccumulator::add(std::span<const std::byte> bytes) {
  const std::uint64_t size = itemsize(dtype_);
  const std::size_t block_nbytes = static_cast<std::size_t>(kBlockNumel) * size;
  // A float4 byte becomes two float32. No other element needs more than 8 bytes.
  alignas(64) std::array<std::byte, 8 * static_cast<std::size_t>(kBlockNumel)> memory;
  for (; !bytes.empty(); bytes = bytes.subspan(std::min(block_nbytes, bytes.size()))) {
    const auto block = bytes.first(std::min(block_nbytes, bytes.size()));
    const std::size_t count =
        block.size() / size * static_cast<std::size_t>(numbers_per_element(dtype_));
    if (dtype_ == DType::int64) {
      auto* numbers = reinterpret_cast<std::int64_t*>(memory.data());
      copy_numbers(block, std::span(numbers, count));
      statistics_.merge(integer_block_statistics(numbers, count));
    } else if (dtype_ == DType::uint64) {
      auto* numbers = reinterpret_cast<std::uint64_t*>(memory.data());
      copy_numbers(block, std::span(numbers, count));
      statistics_.merge(integer_block_statistics(numbers, count));
    } else if (fits_float32(dtype_)) {
      auto* numbers = reinterpret_cast<float*>(memory.data());
      to_floats(dtype_, block, {numbers, count});
      statistics_.merge(block_statistics(numbers, count, dtype_));
    } else {
      auto* numbers = reinterpret_cast<double*>(memory.data());
      to_doubles(dtype_, block, {numbers, count});
      statistics_.merge(block_statistics(numbers, count, dtype_));
    }
  }
}

namespace {

// The number of elements of one partial result. Results are merged in order, so they do not depend
// on the threads.
constexpr std::int64_t kWindowNumel = std::int64_t{1} << 21;
static_assert(kWindowNumel % StatisticsAccumulator::kBlockNumel == 0);

// Reads a window in parts that fit the memory limit, and calls `visit` with the bytes of each part.
template <class Visit>
void read_window(const TensorReader& tensor, FlatRange window, const ScanOptions& options,
                 Visit visit) {
  const std::uint64_t size = itemsize(tensor.meta().dtype);
  const std::int64_t read_numel =
      detail::numel_per_read(options, 2, size, StatisticsAccumulator::kBlockNumel, kWindowNumel);
  tessera::detail::ByteBuffer buffer;
  for (std::int64_t begin = window.begin; begin < window.end; begin += read_numel) {
    const std::int64_t end = std::min(window.end, begin + read_numel);
    const auto bytes = buffer.take(static_cast<std::size_t>(end - begin) * size);
    tensor.read({begin, end}, bytes);
    visit(bytes);
    if (options.progress) options.progress(bytes.size());
    detail::throw_if_stopped(options);
  }
}

std::unique_ptr<object_store::AnnouncedReads> announce_reads(
    const formats::CheckpointReader& reader, std::span<const std::size_t> tensor_indices) {
  formats::ReadAnnouncement reads(reader);
  for (const std::size_t t : tensor_indices) reads.add_tensor(t);
  return reads.announce();
}

}  // namespace

std::vector<Statistics> compute_statistics(const formats::CheckpointReader& reader,
                                           std::span<const std::size_t> tensor_indices,
                                           const ScanOptions& options) {
  std::vector<std::int64_t> numels;
  for (std::size_t t : tensor_indices) {
    numels.push_back(reader.contents().tensors.at(t).meta.numel());
  }
  std::vector<Statistics> results(numels.size());
  const auto announced = announce_reads(reader, tensor_indices);
  detail::scan<Statistics>(
      numels, kWindowNumel, options,
      [&](std::size_t i) { return std::make_unique<TensorReader>(reader, tensor_indices[i]); },
      [&](const TensorReader& tensor, FlatRange window, Statistics& partial) {
        StatisticsAccumulator accumulator(tensor.meta().dtype);
        read_window(tensor, window, options,
                    [&](std::span<const std::byte> bytes) { accumulator.add(bytes); });
        partial = accumulator.statistics();
      },
      [&](std::size_t i, const Statistics& partial) { results[i].merge(partial); });
  return results;
}

namespace {

// Returns into how many bins a range can be cut so that float64 tells all edges apart.
double num_distinct_bins(const Histogram& histogram) {
  if (histogram.begin == histogram.end) return 1;
  const double largest = std::max(std::fabs(histogram.begin), std::fabs(histogram.end));
  const double step = largest - std::nextafter(largest, 0.0);  // between neighbours in float64
  // Halves, because the difference of the ends may be infinite. Two steps, because edges are
  // rounded.
  return std::floor((histogram.end / 2 - histogram.begin / 2) / step);
}

// Returns the histogram with empty bins.
Histogram empty_histogram(const Statistics& statistics, int max_num_bins) {
  Histogram histogram;
  if (!statistics.min) return histogram;
  histogram.begin = to_double(*statistics.min);
  histogram.end = to_double(*statistics.max);
  const double wanted = std::min<double>(max_num_bins, num_distinct_bins(histogram));
  auto num_bins = static_cast<std::size_t>(std::max(1.0, wanted));
  const bool is_integer = !std::holds_alternative<double>(*statistics.min);
  if (is_integer) {
    const double num_integers = histogram.end - histogram.begin + 1;
    const double width = std::ceil(num_integers / static_cast<double>(num_bins));
    num_bins = static_cast<std::size_t>(std::ceil(num_integers / width));
    histogram.end = histogram.begin + width * static_cast<double>(num_bins);
  } else if (histogram.begin == histogram.end) {
    num_bins = 1;
  }
  histogram.counts.assign(num_bins, 0);
  return histogram;
}

// Adds the finite numbers to the counts of the histogram's bins.
void count_numbers(std::span<const double> numbers, const Histogram& histogram,
                   std::span<std::int64_t> counts) {
  // Computes with half of the range, because `end - begin` may be infinite.
  const double half_range = histogram.end / 2 - histogram.begin / 2;
  const auto num_bins = static_cast<double>(counts.size());
  for (const double x : numbers) {
    if (!std::isfinite(x)) continue;
    // The number's place in the range, from 0 to 1.
    const double place = half_range > 0 ? (x / 2 - histogram.begin / 2) / half_range : 0;
    const auto bin = static_cast<std::size_t>(std::max(0.0, place * num_bins));
    ++counts[std::min(bin, counts.size() - 1)];
  }
}

}  // namespace

std::vector<Histogram> compute_histograms(const formats::CheckpointReader& reader,
                                          std::span<const std::size_t> tensor_indices,
                                          std::span<const Statistics> statistics, int max_num_bins,
                                          const ScanOptions& options) {
  TESSERA_CHECK(statistics.size() == tensor_indices.size());
  std::vector<Histogram> histograms;
  std::vector<std::size_t> subjects;     // tensors that have bins, as indices into `tensor_indices`
  std::vector<std::size_t> of_subjects;  // the same tensors, as indices into the contents
  std::vector<std::int64_t> numels;
  for (std::size_t i = 0; i < tensor_indices.size(); ++i) {
    histograms.push_back(empty_histogram(statistics[i], max_num_bins));
    if (histograms.back().counts.empty()) continue;
    subjects.push_back(i);
    of_subjects.push_back(tensor_indices[i]);
    numels.push_back(reader.contents().tensors.at(tensor_indices[i]).meta.numel());
  }
  struct Subject {
    TensorReader tensor;
    const Histogram& histogram;
  };
  const auto announced = announce_reads(reader, of_subjects);
  detail::scan<std::vector<std::int64_t>>(
      numels, kWindowNumel, options,
      [&](std::size_t s) {
        return std::make_unique<Subject>(TensorReader(reader, tensor_indices[subjects[s]]),
                                         histograms[subjects[s]]);
      },
      [&](const Subject& subject, FlatRange window, std::vector<std::int64_t>& counts) {
        const DType dtype = subject.tensor.meta().dtype;
        const std::size_t block_nbytes =
            static_cast<std::size_t>(StatisticsAccumulator::kBlockNumel) * itemsize(dtype);
        counts.resize(subject.histogram.counts.size());
        std::vector<double> numbers;
        read_window(subject.tensor, window, options, [&](std::span<const std::byte> bytes) {
          for (std::size_t at = 0; at < bytes.size(); at += block_nbytes) {
            const auto block = bytes.subspan(at, std::min(block_nbytes, bytes.size() - at));
            numbers.resize(block.size() / itemsize(dtype) *
                           static_cast<std::size_t>(numbers_per_element(dtype)));
            to_doubles(dtype, block, numbers);
            count_numbers(numbers, subject.histogram, counts);
          }
        });
      },
      [&](std::size_t s, const std::vector<std::int64_t>& counts) {
        Histogram& histogram = histograms[subjects[s]];
        for (std::size_t bin = 0; bin < counts.size(); ++bin) histogram.counts[bin] += counts[bin];
      });
  return histograms;
}

Histogram compute_histogram(const formats::CheckpointReader& reader, std::size_t tensor_index,
                            const Statistics& statistics, int max_num_bins,
                            const ScanOptions& options) {
  return compute_histograms(reader, {&tensor_index, 1}, {&statistics, 1}, max_num_bins, options)
      .front();
}

}  // namespace tessera::inspect
