#include "arithmetic/tensor_sum.h"

#include <algorithm>
#include <cmath>
#include <variant>

#include "arithmetic/element_sum.h"
#include "arithmetic/low_rank.h"
#include "arithmetic/overflow.h"

namespace tessera::arithmetic {
namespace {

/// How many elements are summed up at a time.
constexpr std::int64_t kWindowNumel = std::int64_t{1} << 18;

}  // namespace

void read_region(const inspect::TensorReader& tensor, const Region& region, FlatRange window,
                 std::span<std::byte> out) {
  if (const auto range = as_flat_range(region, tensor.meta().shape)) {
    tensor.read({range->begin + window.begin, range->begin + window.end}, out);
  } else {
    tensor.read(std::get<Box>(region), window, out);
  }
}

bool have_equal_elements(const inspect::TensorReader& a, const inspect::TensorReader& b) {
  if (a.reads_same_tensor(b)) return true;
  const auto size = static_cast<std::size_t>(itemsize(a.meta().dtype));
  std::vector<std::byte> bytes;
  std::vector<std::byte> other;
  for (std::int64_t begin = 0; begin < a.meta().numel();) {
    const FlatRange window{begin, a.window_end(begin, kWindowNumel)};
    bytes.resize(static_cast<std::size_t>(window.numel()) * size);
    other.resize(bytes.size());
    a.read(window, bytes);
    b.read(window, other);
    if (bytes != other) return false;
    begin = window.end;
  }
  return true;
}

bool have_equal_numbers(const inspect::TensorReader& a, const inspect::TensorReader& b) {
  if (a.meta().shape != b.meta().shape) return false;
  if (a.meta().dtype == b.meta().dtype) return have_equal_elements(a, b);
  if (!can_be_summed(a.meta().dtype) || !can_be_summed(b.meta().dtype) ||
      is_complex(a.meta().dtype) || is_complex(b.meta().dtype)) {
    return false;
  }
  const CombineOptions exact;  // float64 holds the numbers of all these dtypes
  const Region whole = FlatRange{0, a.meta().numel()};
  const auto numbers_of = [&](const inspect::TensorReader& tensor, FlatRange window) {
    TensorSum copy(tensor.meta(), exact);
    copy.add({tensor});
    std::vector<std::byte> numbers(static_cast<std::size_t>(window.numel()) * sizeof(double));
    copy.read(whole, window, DType::float64, {}, numbers);
    return numbers;
  };
  for (std::int64_t begin = 0; begin < a.meta().numel(); begin += kWindowNumel) {
    const FlatRange window{begin, std::min(begin + kWindowNumel, a.meta().numel())};
    if (numbers_of(a, window) != numbers_of(b, window)) return false;
  }
  return true;
}

void TensorSum::read(const Region& region, FlatRange window, DType to, const std::string& path,
                     std::span<std::byte> out) const {
  std::vector<RoundingLosses::Part> parts{{window}};
  if (options_->losses) parts = options_->losses->take(meta_.fqn, region, window);
  const auto size = static_cast<std::size_t>(itemsize(to));
  for (const auto& [range, is_new] : parts) {
    RoundingLosses* const losses = is_new ? options_->losses.get() : nullptr;
    for (std::int64_t begin = range.begin; begin < range.end; begin += kWindowNumel) {
      const FlatRange part{begin, std::min(begin + kWindowNumel, range.end)};
      const auto room = out.subspan(static_cast<std::size_t>(begin - window.begin) * size,
                                    static_cast<std::size_t>(part.numel()) * size);
      if (options_->accumulation == Accumulation::float64) {
        read_numbers<double>(region, part, to, path, losses, room);
      } else {
        read_numbers<float>(region, part, to, path, losses, room);
      }
    }
  }
}

template <class Number>
void TensorSum::read_numbers(const Region& region, FlatRange window, DType to,
                             const std::string& path, RoundingLosses* losses,
                             std::span<std::byte> out) const {
  std::vector<Number> sum(static_cast<std::size_t>(window.numel()) *
                          numbers_per_element(meta_.dtype));
  sum_up<Number>(region, window, SumPass::numbers, sum);
  const std::vector<std::size_t> overflowed = mend_overflows<Number>(region, window, sum);
  const CastLosses lost =
      round_numbers({sizeof(Number) == sizeof(double) ? DType::float64 : DType::float32,
                     std::as_bytes(std::span(sum)), overflowed},
                    options_->on_overflow, path, meta_.fqn, number_dtype(to), out);
  if (losses != nullptr) losses->add(meta_.fqn, lost);
}

/// A sum can be infinite or NaN although all its terms are finite. Computes such sums again from
/// smaller numbers (SumPass::scaled_down), then scales them up. Returns the positions of the sums
/// that are still infinite or NaN.
template <class Number>
std::vector<std::size_t> TensorSum::mend_overflows(const Region& region, FlatRange window,
                                                   std::span<Number> sum) const {
  const auto is_finite = [](Number number) { return std::isfinite(number); };
  std::vector<std::size_t> overflowed;
  if (std::ranges::all_of(sum, is_finite)) return overflowed;
  std::vector<double> infinities(sum.size());
  sum_up<double>(region, window, SumPass::infinities, infinities);
  for (std::size_t i = 0; i < sum.size(); ++i) {
    if (!is_finite(sum[i]) && infinities[i] == 0.0) overflowed.push_back(i);
  }
  if (overflowed.empty()) return overflowed;
  std::vector<Number> scaled(sum.size());
  sum_up<Number>(region, window, SumPass::scaled_down, scaled);
  for (const std::size_t i : overflowed) sum[i] = std::ldexp(scaled[i], kSumScale<Number>);
  std::erase_if(overflowed, [&](std::size_t i) { return is_finite(sum[i]); });
  return overflowed;
}

template <class Number>
void TensorSum::sum_up(const Region& region, FlatRange window, SumPass pass,
                       std::span<Number> sum) const {
  const double scale = pass == SumPass::scaled_down ? std::ldexp(1.0, -kSumScale<Number>) : 1.0;
  std::vector<std::byte> elements;
  const auto read = [&](const inspect::TensorReader& tensor) {
    elements.resize(static_cast<std::size_t>(window.numel()) * itemsize(tensor.meta().dtype));
    read_region(tensor, region, window, elements);
    const DType dtype = number_dtype(tensor.meta().dtype);
    if (pass != SumPass::infinities) return dtype;
    elements = infinities_of(dtype, elements);
    return DType::float64;
  };
  for (std::size_t i = 0; i < terms_.size(); ++i) {
    const DType dtype = read(terms_[i].tensor);
    const Step& step = terms_[i].step;
    if (i == 0) {
      start_sum<Number>(dtype, elements, step.weight * scale, sum);
    } else {
      add_to_sum<Number>(dtype, elements, step.keep, step.weight * scale, sum);
    }
  }
  if (divisor_ != 1.0) divide_sum<Number>(divisor_, sum);
  for (const LowRankTerm& term : low_rank_) {
    add_low_rank<Number>(term, meta_.shape, region, window, pass, sum);
  }
  for (const SumTerm& term : added_) {
    const DType dtype = read(term.tensor);
    add_to_sum<Number>(dtype, elements, 1.0, term.step.weight * scale, sum);
  }
}

}  // namespace tessera::arithmetic
