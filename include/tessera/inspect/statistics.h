#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/inspect/element.h"
#include "tessera/inspect/scan_options.h"

namespace tessera::inspect {

/// What a tensor's numbers are like. Minimum, maximum, mean and standard deviation are those of the
/// finite numbers, so that one NaN does not hide the rest. Complex numbers count by magnitude, bool
/// as 0 and 1; a float4_e2m1fn_x2 element is two numbers.
/// A plain value type; `merge` adds another tensor's (or part's) numbers.
struct Statistics {
  std::int64_t numel = 0;  // numbers looked at
  std::int64_t num_zeros = 0;
  std::int64_t num_nan = 0;
  std::int64_t num_positive_inf = 0;
  std::int64_t num_negative_inf = 0;
  std::optional<Number> min{};  // exact; nothing where no number is finite
  std::optional<Number> max{};
  long double sum = 0;                     // exact for integers up to 64 bits of sum
  long double squared_deviations_sum = 0;  // of (x - mean)^2

  std::int64_t num_finite() const { return numel - num_nan - num_positive_inf - num_negative_inf; }
  /// Returns nothing where no number is finite.
  std::optional<double> mean() const;
  /// Returns torch.std: divided by one less than the finite numbers; nothing below two of them.
  std::optional<double> standard_deviation() const;

  /// Adds the numbers of another tensor, or of another part of this one.
  void merge(const Statistics& other);
};

/// Computes statistics of elements that arrive in parts. The result depends on the elements alone,
/// not on where they are cut, as long as each part but the last is a multiple of `kBlockNumel`.
/// Not thread-safe.
class StatisticsAccumulator {
 public:
  static constexpr std::int64_t kBlockNumel = 8192;

  explicit StatisticsAccumulator(DType dtype) : dtype_(dtype) {}
  /// Requires: whole elements.
  void add(std::span<const std::byte> bytes);
  const Statistics& statistics() const { return statistics_; }

 private:
  DType dtype_;
  Statistics statistics_;
};

/// Returns the statistics of each of the tensors, in the order of `tensor_indices`. Equal tensors
/// give equal results bit for bit, however they are cut into pieces and whatever `options` say.
/// Throws: Error(corruption) where pieces do not cover a tensor or are damaged; Error(io);
/// Error(interrupted).
std::vector<Statistics> compute_statistics(const formats::CheckpointReader& reader,
                                           std::span<const std::size_t> tensor_indices,
                                           const ScanOptions& options);

/// Counts finite numbers in bins of equal width from `begin` to `end`. Bins are half-open; the last
/// one has its end.
struct Histogram {
  double begin = 0;
  double end = 0;
  std::vector<std::int64_t> counts;
};

/// Returns the histogram of a tensor between its minimum and maximum, as `statistics` has them.
/// Integers get bins of a whole width, fewer than `max_num_bins` where their range is small. No
/// bins where no number is finite. Throws: as compute_statistics.
Histogram compute_histogram(const formats::CheckpointReader& reader, std::size_t tensor_index,
                            const Statistics& statistics, int max_num_bins,
                            const ScanOptions& options);

/// The same for each of the tensors, in the order of `tensor_indices`.
/// Requires: `statistics.size() == tensor_indices.size()`.
std::vector<Histogram> compute_histograms(const formats::CheckpointReader& reader,
                                          std::span<const std::size_t> tensor_indices,
                                          std::span<const Statistics> statistics, int max_num_bins,
                                          const ScanOptions& options);

}  // namespace tessera::inspect
