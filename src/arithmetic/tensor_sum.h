#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "arithmetic/combination.h"
#include "tessera/inspect/tensor_reader.h"
#include "tessera/layout/region.h"

namespace tessera::arithmetic {

/// A tensor of a source, and how it enters a sum.
struct SumTerm {
  inspect::TensorReader tensor;
  Step step{};
};

/// A product of two matrices that is added to a sum: `scale * up * down`, or its transpose. The
/// rows are the first dimension of the sum; all other dimensions together are the columns.
struct LowRankTerm {
  inspect::TensorReader down;  // [rank, columns]; transposed: [rank, rows]
  inspect::TensorReader up;    // [rows, rank]; transposed: [columns, rank]
  bool is_transposed = false;
  double scale = 1.0;

  std::int64_t rank() const { return down.meta().shape.front(); }
};

/// What a pass over the terms of a sum computes.
enum class SumPass {
  numbers,      // the sum
  scaled_down,  // the sum times 2^-kSumScale<Number>, so that only larger sums overflow
  infinities,   // NaN where a term is infinite or NaN, else 0
};

/// SumPass::scaled_down multiplies the sum by 2 to the power -kSumScale.
template <class Number>
inline constexpr int kSumScale = sizeof(Number) == sizeof(double) ? 64 : 32;

/// Fills `out` with elements `window` of a region of a tensor, in the region's row-major order.
void read_region(const inspect::TensorReader& tensor, const Region& region, FlatRange window,
                 std::span<std::byte> out);

/// Returns whether two tensors have the same bytes. Requires: the same shape and dtype.
bool have_equal_elements(const inspect::TensorReader& a, const inspect::TensorReader& b);
/// Returns whether two tensors have the same shape and the same numbers, also in different dtypes.
bool have_equal_numbers(const inspect::TensorReader& a, const inspect::TensorReader& b);

/// Computes one tensor of a combination. Reads elements of the sources only in calls of `read`, and
/// uses at most about 16 MiB of memory for each call. Immutable while it is read, so thread-safe.
class TensorSum {
 public:
  TensorSum(TensorMeta meta, const CombineOptions& options)
      : meta_(std::move(meta)), options_(&options), divisor_(options.divisor) {}

  /// Adds the next term. Requires: the term has the shape of the sum.
  void add(SumTerm term) { terms_.push_back(std::move(term)); }
  /// Adds a term to the sum after the division, so that the divisor does not divide it.
  void add_after(SumTerm term) { added_.push_back(std::move(term)); }
  void add_after(LowRankTerm term) { low_rank_.push_back(std::move(term)); }
  /// Replaces all terms of `add` by `term`, and the divisor by 1. Keeps the terms of `add_after`.
  void replace_terms(SumTerm term) {
    terms_.clear();
    terms_.push_back(std::move(term));
    divisor_ = 1.0;
  }

  /// Fills `out` with elements `window` of a region of the sum, in the region's row-major order,
  /// rounded to `to`. A sum of finite numbers that is infinite or NaN counts as too large for `to`.
  /// Throws: Error(mismatch) naming `path` and the tensor if round_numbers (overflow.h) refuses a
  /// sum that is too large; what readers throw.
  void read(const Region& region, FlatRange window, DType to, const std::string& path,
            std::span<std::byte> out) const;

 private:
  /// Counts in `losses`, unless it is null, numbers that were too large or became zero.
  template <class Number>
  void read_numbers(const Region& region, FlatRange window, DType to, const std::string& path,
                    RoundingLosses* losses, std::span<std::byte> out) const;
  template <class Number>
  void sum_up(const Region& region, FlatRange window, SumPass pass, std::span<Number> sum) const;
  template <class Number>
  std::vector<std::size_t> mend_overflows(const Region& region, FlatRange window,
                                          std::span<Number> sum) const;

  TensorMeta meta_;  // as in the first source
  const CombineOptions* options_;
  double divisor_;
  std::vector<SumTerm> terms_;
  std::vector<SumTerm> added_;
  std::vector<LowRankTerm> low_rank_;
};

}  // namespace tessera::arithmetic
