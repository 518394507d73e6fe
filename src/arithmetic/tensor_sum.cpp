#include "arithmetic/tensor_sum.h"

#include <algorithm>
#include <variant>

#include "arithmetic/element_sum.h"
#include "arithmetic/low_rank.h"
#include "base/cast.h"
#include "reshard/cast_losses.h"
#include "tessera/base/error.h"

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

void TensorSum::read(const Region& region, FlatRange window, DType to,
                     std::span<std::byte> out) const {
  const auto size = static_cast<std::size_t>(itemsize(to));
  for (std::int64_t begin = window.begin; begin < window.end; begin += kWindowNumel) {
    const FlatRange part{begin, std::min(begin + kWindowNumel, window.end)};
    const auto room = out.subspan(static_cast<std::size_t>(begin - window.begin) * size,
                                  static_cast<std::size_t>(part.numel()) * size);
    if (options_->accumulation == Accumulation::float64) {
      read_numbers<double>(region, part, to, room);
    } else {
      read_numbers<float>(region, part, to, room);
    }
  }
}

template <class Number>
void TensorSum::read_numbers(const Region& region, FlatRange window, DType to,
                             std::span<std::byte> out) const {
  std::vector<Number> sum(static_cast<std::size_t>(window.numel()) *
                          numbers_per_element(meta_.dtype));
  sum_up<Number>(region, window, sum);
  round(sizeof(Number) == sizeof(double) ? DType::float64 : DType::float32,
        std::as_bytes(std::span(sum)), number_dtype(to), out);
}

template <class Number>
void TensorSum::sum_up(const Region& region, FlatRange window, std::span<Number> sum) const {
  std::vector<std::byte> elements;
  const auto read = [&](const inspect::TensorReader& tensor) {
    elements.resize(static_cast<std::size_t>(window.numel()) * itemsize(tensor.meta().dtype));
    read_region(tensor, region, window, elements);
    return number_dtype(tensor.meta().dtype);
  };
  for (std::size_t i = 0; i < terms_.size(); ++i) {
    const DType dtype = read(terms_[i].tensor);
    const Step& step = terms_[i].step;
    if (i == 0) {
      start_sum<Number>(dtype, elements, step.weight, sum);
    } else {
      add_to_sum<Number>(dtype, elements, step.keep, step.weight, sum);
    }
  }
  if (divisor_ != 1.0) divide_sum<Number>(divisor_, sum);
  for (const LowRankTerm& term : low_rank_) {
    add_low_rank<Number>(term, meta_.shape, region, window, sum);
  }
  for (const SumTerm& term : added_) {
    const DType dtype = read(term.tensor);
    add_to_sum<Number>(dtype, elements, 1.0, term.step.weight, sum);
  }
}

void TensorSum::round(DType from, std::span<const std::byte> numbers, DType to,
                      std::span<std::byte> out) const {
  const CastLosses losses =
      cast_and_count(from, numbers, to, out, reshard::too_large_by(options_->on_overflow));
  if (losses.num_too_large == 0 || options_->on_overflow != reshard::OnOverflow::refuse) return;
  throw reshard::overflow_error({}, meta_.fqn, to, losses);
}

}  // namespace tessera::arithmetic
