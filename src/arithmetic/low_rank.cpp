#include "arithmetic/low_rank.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "arithmetic/element_sum.h"

namespace tessera::arithmetic {
namespace {

/// The maximum number of elements of a matrix in memory at a time. Only a longer row exceeds it.
constexpr std::int64_t kProductNumel = std::int64_t{1} << 19;

/// Consecutive elements of one row of the term, and the index of the first one in the sum's memory.
struct Segment {
  std::int64_t row;
  FlatRange columns;
  std::int64_t place;
};

/// A part of a matrix, row by row.
template <class Number>
struct Part {
  std::vector<Number> numbers;
  std::int64_t width = 0;

  std::span<const Number> row(std::int64_t index) const {
    return std::span(numbers).subspan(static_cast<std::size_t>(index * width),
                                      static_cast<std::size_t>(width));
  }
};

/// How the elements of a matrix become numbers. SumPass::infinities: as infinities_of, without
/// `factor`. Any other pass: element * factor; `pass` itself does not scale it down.
struct Reading {
  SumPass pass;
  double factor = 1.0;
};

/// Reads some rows and columns of a matrix that has `width` columns.
template <class Number>
Part<Number> read_part(const inspect::TensorReader& matrix, const Reading& reading,
                       std::int64_t width, FlatRange rows, FlatRange columns) {
  const DType dtype = matrix.meta().dtype;
  Part<Number> part{std::vector<Number>(static_cast<std::size_t>(rows.numel() * columns.numel())),
                    columns.numel()};
  const bool has_all_columns = columns.numel() == width;
  const std::int64_t at_once = has_all_columns ? rows.numel() * width : columns.numel();
  if (part.numbers.empty()) return part;
  std::vector<std::byte> bytes(static_cast<std::size_t>(at_once) * itemsize(dtype));
  for (std::int64_t done = 0; done < rows.numel() * columns.numel(); done += at_once) {
    const std::int64_t begin = (rows.begin + done / columns.numel()) * width + columns.begin;
    matrix.read({begin, begin + at_once}, bytes);
    const auto room =
        std::span(part.numbers)
            .subspan(static_cast<std::size_t>(done), static_cast<std::size_t>(at_once));
    if (reading.pass == SumPass::infinities) {
      start_sum<Number>(DType::float64, infinities_of(dtype, bytes), 1.0, room);
    } else {
      start_sum<Number>(dtype, bytes, reading.factor, room);
    }
  }
  return part;
}

template <class Number>
Part<Number> transposed(const Part<Number>& part) {
  if (part.width == 0) return part;
  const auto width = static_cast<std::size_t>(part.width);
  const std::size_t height = part.numbers.size() / width;
  Part<Number> result{std::vector<Number>(part.numbers.size()), static_cast<std::int64_t>(height)};
  for (std::size_t r = 0; r < height; ++r) {
    for (std::size_t c = 0; c < width; ++c) {
      result.numbers[c * height + r] = part.numbers[r * width + c];
    }
  }
  return result;
}

std::vector<Segment> segments_of(const Shape& shape, std::int64_t num_columns, const Region& region,
                                 FlatRange window) {
  std::vector<Segment> segments;
  const CopyRuns runs(shape, FlatRange{0, numel_of(shape)}, region);
  runs.for_each_in(window, [&](const CopyRuns::Run& run) {
    for (std::int64_t done = 0; done < run.numel;) {
      const std::int64_t at = run.source_begin + done;
      const std::int64_t column = at % num_columns;
      const std::int64_t numel = std::min(num_columns - column, run.numel - done);
      segments.push_back({at / num_columns,
                          {column, column + numel},
                          run.destination_begin + done - window.begin});
      done += numel;
    }
  });
  return segments;
}

template <class Number>
class Addition {
 public:
  Addition(const LowRankTerm& term, const Shape& shape, SumPass pass, std::span<Number> sum)
      : term_(term),
        pass_(pass),
        rank_(term.rank()),
        num_rows_(shape.front()),
        num_columns_(numel_of(shape) / shape.front()),
        sum_(sum) {}

  std::int64_t num_columns() const { return num_columns_; }
  std::int64_t rows_at_once() const { return std::max<std::int64_t>(1, kProductNumel / rank_); }

  /// Adds the product's elements in `segments` to the sum. Requires: at most rows_at_once() rows
  /// from the first segment to the last one.
  void add(std::span<const Segment> segments) const {
    const FlatRange rows{segments.front().row, segments.back().row + 1};
    const Reading reading{
        pass_, pass_ == SumPass::scaled_down ? std::ldexp(1.0, -kSumScale<Number>) : 1.0};
    const Part<Number> left =
        term_.is_transposed
            ? transposed(read_part<Number>(term_.down, reading, num_rows_, {0, rank_}, rows))
            : read_part<Number>(term_.up, reading, rank_, rows, {0, rank_});
    FlatRange columns = segments.front().columns;
    for (const Segment& segment : segments) {
      columns.begin = std::min(columns.begin, segment.columns.begin);
      columns.end = std::max(columns.end, segment.columns.end);
    }
    const std::int64_t at_once = std::max<std::int64_t>(1, kProductNumel / rank_);
    for (std::int64_t begin = columns.begin; begin < columns.end; begin += at_once) {
      add_tile(left, rows.begin, {begin, std::min(begin + at_once, columns.end)}, segments);
    }
  }

 private:
  void add_tile(const Part<Number>& left, std::int64_t first_row, FlatRange tile,
                std::span<const Segment> segments) const {
    const Part<Number> right =
        term_.is_transposed
            ? transposed(read_part<Number>(term_.up, {pass_}, rank_, tile, {0, rank_}))
            : read_part<Number>(term_.down, {pass_}, num_columns_, {0, rank_}, tile);
    std::vector<Number> product;
    for (const Segment& segment : segments) {
      const FlatRange common{std::max(tile.begin, segment.columns.begin),
                             std::min(tile.end, segment.columns.end)};
      if (common.begin >= common.end) continue;
      const auto numel = static_cast<std::size_t>(common.numel());
      product.assign(numel, Number{0});
      const std::span<const Number> factors = left.row(segment.row - first_row);
      for (std::int64_t k = 0; k < rank_; ++k) {
        add_multiple<Number>(
            factors[static_cast<std::size_t>(k)],
            right.row(k).subspan(static_cast<std::size_t>(common.begin - tile.begin), numel),
            product);
      }
      const std::int64_t place = segment.place + common.begin - segment.columns.begin;
      add_multiple<Number>(static_cast<Number>(term_.scale), product,
                           sum_.subspan(static_cast<std::size_t>(place), numel));
    }
  }

  const LowRankTerm& term_;
  const SumPass pass_;
  const std::int64_t rank_;
  const std::int64_t num_rows_;
  const std::int64_t num_columns_;
  std::span<Number> sum_;
};

}  // namespace

template <class Number>
void add_low_rank(const LowRankTerm& term, const Shape& shape, const Region& region,
                  FlatRange window, SumPass pass, std::span<Number> sum) {
  if (window.numel() == 0 || term.rank() == 0) return;
  const Addition<Number> addition(term, shape, pass, sum);
  const std::vector<Segment> segments = segments_of(shape, addition.num_columns(), region, window);
  for (std::size_t begin = 0; begin < segments.size();) {
    std::size_t end = begin + 1;
    while (end < segments.size() &&
           segments[end].row - segments[begin].row < addition.rows_at_once()) {
      ++end;
    }
    addition.add(std::span(segments).subspan(begin, end - begin));
    begin = end;
  }
}

template void add_low_rank(const LowRankTerm&, const Shape&, const Region&, FlatRange, SumPass,
                           std::span<double>);
template void add_low_rank(const LowRankTerm&, const Shape&, const Region&, FlatRange, SumPass,
                           std::span<float>);

}  // namespace tessera::arithmetic
