#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "inspect/element.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/inspect/tensor_reader.h"

namespace tessera::inspect {

/// Statistics of a tensor's numbers. Minimum, maximum, mean and standard deviation ignore NaN and
/// infinities. Complex numbers count by magnitude (at most the largest float64), bool as 0 and 1; a
/// float4_e2m1fn_x2 element is two numbers. A plain value type.
struct Statistics {
  std::int64_t numel = 0;  // all numbers, also NaNs and infinities
  std::int64_t num_zeros = 0;
  std::int64_t num_nan = 0;
  std::int64_t num_positive_inf = 0;
  std::int64_t num_negative_inf = 0;
  std::optional<Number> min{};  // exact; nothing if no number is finite
  std::optional<Number> max{};
  long double sum = 0;                     // exact for integers while the sum fits 64 bits
  long double squared_deviations_sum = 0;  // sum of (x - mean)^2

  std::int64_t num_finite() const { return numel - num_nan - num_positive_inf - num_negative_inf; }
  /// Returns nothing if no number is finite.
  std::optional<double> mean() const;
  /// Returns torch.std (divided by n - 1) of the finite numbers; nothing for fewer than two.
  std::optional<double> standard_deviation() const;

  /// Adds the numbers of another tensor, or of other elements of this tensor.
  void merge(const Statistics& other);
};

/// Computes statistics of elements that arrive in blocks. The result does not depend on where the
/// blocks are cut, if each block but the last has a multiple of `kBlockNumel` elements. Not
/// thread-safe.
class StatisticsAccumulator {
 public:
  static constexpr std::int64_t kBlockNumel = 8192;

  explicit StatisticsAccumulator(DType dtype) : dtype_(dtype) {}
  /// Adds a block. Requires: `bytes` are whole elements.
  void add(std::span<const std::byte> bytes);
  const Statistics& statistics() const { return statistics_; }

 private:
  DType dtype_;
  Statistics statistics_;
};

/// Returns the statistics of each tensor, in the order of `tensor_indices`. Results are equal bit
/// for bit for equal tensors, whatever their pieces and `options`. Throws: Error(corruption) if
/// pieces do not cover a tensor or are damaged; Error(io); Error(interrupted).
std::vector<Statistics> compute_statistics(const formats::CheckpointReader& reader,
                                           std::span<const std::size_t> tensor_indices,
                                           const ScanOptions& options);

/// Counts of finite numbers in bins of equal width from `begin` to `end`. Bins are half-open; the
/// last one includes `end`.
struct Histogram {
  double begin = 0;
  double end = 0;
  std::vector<std::int64_t> counts;
};

/// Returns the histogram of a tensor from the minimum to the maximum in `statistics`. For integers,
/// bins have an integer width: there may be fewer than `max_num_bins`, and the last may end beyond
/// the maximum. Without a finite number there are no bins. Throws: as compute_statistics.
Histogram compute_histogram(const formats::CheckpointReader& reader, std::size_t tensor_index,
                            const Statistics& statistics, int max_num_bins,
                            const ScanOptions& options);

/// Returns the histograms of several tensors, in the order of `tensor_indices`. Requires:
/// `statistics.size() == tensor_indices.size()`.
std::vector<Histogram> compute_histograms(const formats::CheckpointReader& reader,
                                          std::span<const std::size_t> tensor_indices,
                                          std::span<const Statistics> statistics, int max_num_bins,
                                          const ScanOptions& options);

}  // namespace tessera::inspect
