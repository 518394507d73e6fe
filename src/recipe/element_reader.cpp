#include "recipe/element_reader.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>

#include "base/cast.h"
#include "base/float_text.h"
#include "formats/gatherer.h"
#include "tessera/base/error.h"

namespace tessera::recipe {
namespace {

using tessera::detail::ByteBuffer;

/// If the gap between two elements is at most this large, one read of both and of the gap is
/// cheaper than two reads.
constexpr std::uint64_t kMaxGapNbytes = std::uint64_t{64} << 10;

std::uint64_t nbytes(std::int64_t numel, std::uint64_t itemsize) {
  return static_cast<std::uint64_t>(numel) * itemsize;
}

std::int64_t flat_index(std::span<const std::int64_t> offsets,
                        std::span<const std::int64_t> strides) {
  std::int64_t index = 0;
  for (std::size_t d = 0; d < offsets.size(); ++d) index += offsets[d] * strides[d];
  return index;
}

FlatRange bounds_of(const Block& block, std::span<const std::int64_t> strides) {
  const std::int64_t begin = flat_index(block.box.offsets, strides);
  std::int64_t last = begin;
  for (std::size_t d = 0; d < strides.size(); ++d) last += (block.box.sizes[d] - 1) * strides[d];
  return {begin, last + 1};
}

/// Steps through all positions of a box with given sizes. The last dimension varies fastest.
class Odometer {
 public:
  explicit Odometer(Shape sizes) : sizes_(std::move(sizes)), at_(sizes_.size()) {}
  const Shape& at() const { return at_; }
  bool next() {
    for (std::size_t d = sizes_.size(); d-- > 0;) {
      if (++at_[d] < sizes_[d]) return true;
      at_[d] = 0;
    }
    return false;
  }

 private:
  Shape sizes_;
  Shape at_;
};

/// A 2-d array of elements to copy, with its strides in source and target. Units: bytes.
struct Plane {
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t row_from, row_to;
  std::int64_t column_from, column_to;
};

/// Transposes a square of elements, with as many rows and columns as elements fit into 8 bytes.
/// Works on 8-byte words and swaps parts of them, first single elements, then larger parts. Strides
/// are in bytes.
template <std::size_t kItemsize>
void transpose_square(const std::byte* from, std::int64_t column_from, std::byte* to,
                      std::int64_t row_to) {
  static_assert(std::endian::native == std::endian::little);
  constexpr std::size_t kSide = 8 / kItemsize;
  std::array<std::uint64_t, kSide> words;
  for (std::size_t i = 0; i < kSide; ++i) {
    std::memcpy(&words[i], from + static_cast<std::int64_t>(i) * column_from, 8);
  }
  for (std::size_t distance = 1; distance < kSide; distance *= 2) {
    const std::size_t bits = 8 * kItemsize * distance;
    const std::uint64_t low = ~std::uint64_t{0} / ((std::uint64_t{1} << bits) + 1);
    for (std::size_t i = 0; i < kSide; ++i) {
      if ((i & distance) != 0) continue;
      const std::uint64_t a = words[i];
      const std::uint64_t b = words[i + distance];
      words[i] = (a & low) | ((b & low) << bits);
      words[i + distance] = ((a >> bits) & low) | (b & ~low);
    }
  }
  for (std::size_t i = 0; i < kSide; ++i) {
    std::memcpy(to + static_cast<std::int64_t>(i) * row_to, &words[i], 8);
  }
}

/// Copies a plane whose rows are contiguous in the source and whose columns are contiguous in the
/// target. Goes through a small tile, so that each cache line is read and written once, even if
/// strides are powers of two.
template <std::size_t kItemsize>
void transpose_plane(const Plane& plane, const std::byte* from, std::byte* to) {
  constexpr auto kStep = static_cast<std::int64_t>(kItemsize);
  constexpr std::int64_t kTile = kStep < 16 ? 128 / kStep : 16;
  constexpr std::int64_t kSide = kStep < 8 ? 8 / kStep : 1;
  constexpr std::int64_t kRow = kTile * kStep;
  alignas(64) std::array<std::byte, static_cast<std::size_t>(kTile * kRow)> tile;
  for (std::int64_t r0 = 0; r0 < plane.rows; r0 += kTile) {
    const std::int64_t num_rows = std::min(kTile, plane.rows - r0);
    for (std::int64_t c0 = 0; c0 < plane.columns; c0 += kTile) {
      const std::int64_t num_columns = std::min(kTile, plane.columns - c0);
      const std::byte* source = from + c0 * plane.column_from + r0 * kStep;
      const auto transpose = [&](std::int64_t r, std::int64_t c) {
        const std::byte* first = source + c * plane.column_from + r * kStep;
        std::byte* target = tile.data() + r * kRow + c * kStep;
        if constexpr (kSide > 1) {
          if (r + kSide <= num_rows && c + kSide <= num_columns) {
            return transpose_square<kItemsize>(first, plane.column_from, target, kRow);
          }
        }
        for (std::int64_t i = 0; i < std::min(kSide, num_columns - c); ++i) {
          for (std::int64_t j = 0; j < std::min(kSide, num_rows - r); ++j) {
            std::memcpy(target + j * kRow + i * kStep, first + i * plane.column_from + j * kStep,
                        kItemsize);
          }
        }
      };
      for (std::int64_t c = 0; c < num_columns; c += kSide) {
        for (std::int64_t r = 0; r < num_rows; r += kSide) transpose(r, c);
      }
      for (std::int64_t r = 0; r < num_rows; ++r) {
        std::memcpy(to + (r0 + r) * plane.row_to + c0 * kStep, tile.data() + r * kRow,
                    static_cast<std::size_t>(num_columns) * kItemsize);
      }
    }
  }
}

/// Copies a plane in tiles that fit into the cache.
template <std::size_t kItemsize>
void copy_plane(const Plane& plane, const std::byte* from, std::byte* to) {
  constexpr auto kStep = static_cast<std::int64_t>(kItemsize);
  if (plane.row_from == kStep && plane.column_to == kStep) {
    return transpose_plane<kItemsize>(plane, from, to);
  }
  constexpr std::int64_t kTile = 32;
  for (std::int64_t r0 = 0; r0 < plane.rows; r0 += kTile) {
    const std::int64_t r1 = std::min(r0 + kTile, plane.rows);
    for (std::int64_t c0 = 0; c0 < plane.columns; c0 += kTile) {
      const std::int64_t c1 = std::min(c0 + kTile, plane.columns);
      for (std::int64_t r = r0; r < r1; ++r) {
        const std::byte* source = from + r * plane.row_from + c0 * plane.column_from;
        std::byte* target = to + r * plane.row_to + c0 * plane.column_to;
        for (std::int64_t c = c0; c < c1; ++c) {
          std::memcpy(target, source, kItemsize);
          source += plane.column_from;
          target += plane.column_to;
        }
      }
    }
  }
}

void copy_plane(const Plane& plane, std::uint64_t itemsize, const std::byte* from, std::byte* to) {
  switch (itemsize) {
    case 1:
      return copy_plane<1>(plane, from, to);
    case 2:
      return copy_plane<2>(plane, from, to);
    case 4:
      return copy_plane<4>(plane, from, to);
    case 8:
      return copy_plane<8>(plane, from, to);
    default:
      TESSERA_CHECK(itemsize == 16);
      return copy_plane<16>(plane, from, to);
  }
}

/// Adds a number to each element, in float64, and rounds once. Returns how many finite elements
/// have a sum that is too large for the dtype.
CastLosses add_to(std::span<std::byte> elements, DType dtype, double added) {
  CastLosses losses;
  constexpr std::size_t kAtOnce = 4096;
  const std::uint64_t size = itemsize(dtype);
  std::array<double, kAtOnce> wide;
  for (std::size_t at = 0; at < elements.size(); at += kAtOnce * size) {
    const auto part =
        elements.subspan(at, std::min<std::size_t>(kAtOnce * size, elements.size() - at));
    const std::span<double> numbers(wide.data(), part.size() / size);
    cast_elements(dtype, part, DType::float64, std::as_writable_bytes(numbers));
    for (double& number : numbers) {
      const bool was_finite = std::isfinite(number);
      number += added;
      if (was_finite && !std::isfinite(number)) losses.merge({1, std::abs(number), 0});
    }
    losses.merge(cast_and_count(DType::float64, std::as_bytes(numbers), dtype, part,
                                TooLarge::becomes_infinity));
  }
  return losses;
}

}  // namespace

IndexedBlocks::IndexedBlocks(BlockTensor tensor) : tensor_(std::move(tensor)) {
  const Shape strides = row_major_strides(tensor_.shape);
  std::ranges::sort(tensor_.blocks, {},
                    [&](const Block& block) { return flat_index(block.box.offsets, strides); });
  for (const Block& block : tensor_.blocks) {
    bounds_.push_back(bounds_of(block, strides));
    longest_ = std::max(longest_, bounds_.back().numel());
  }
}

std::size_t IndexedBlocks::first_in(std::int64_t begin) const {
  const auto first = std::ranges::lower_bound(bounds_, begin - longest_, {}, &FlatRange::begin);
  return static_cast<std::size_t>(first - bounds_.begin());
}

std::unique_ptr<ByteBuffer> ElementReader::ScratchPool::take() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) return std::make_unique<ByteBuffer>();
  auto buffer = std::move(free_.back());
  free_.pop_back();
  return buffer;
}

void ElementReader::ScratchPool::give_back(std::unique_ptr<ByteBuffer> buffer) {
  const std::lock_guard lock(mutex_);
  free_.push_back(std::move(buffer));
}

ElementReader::ElementReader(const formats::TensorSource& source, std::string path)
    : source_(source), path_(std::move(path)) {
  for (const formats::TensorEntry& tensor : source.contents().tensors) {
    const bool is_whole =
        !tensor.pieces.empty() && numel_of(tensor.pieces.front().region) == tensor.meta.numel();
    pieces_.push_back(is_whole ? nullptr : std::make_unique<reshard::PieceIndex>(tensor));
  }
}

/// One block in a call of `read`: its source tensor, and the buffer to fill.
struct ElementReader::Work {
  std::size_t tensor;  // index in the source, or kConstant
  double added;
  DType dtype;
  std::uint64_t itemsize;
  std::span<std::byte> out;
  ByteBuffer& scratch;
};

void ElementReader::read(const IndexedBlocks& indexed, FlatRange window, std::span<std::byte> out,
                         Share share) const {
  const BlockTensor& tensor = indexed.tensor();
  const Shape strides = row_major_strides(tensor.shape);
  const std::vector<Box> boxes = boxes_of(window, tensor.shape);
  std::unique_ptr<ByteBuffer> scratch = pool_.take();
  indexed.for_each_in(window, [&](const Block& block) {
    const Work work{block.source, block.added, tensor.dtype, itemsize(tensor.dtype), out, *scratch};
    for (const Box& box : boxes) {
      const auto common = intersect(box, block.box);
      if (!common) continue;
      Copy copy{common->sizes, block.strides, strides, block.offset, -window.begin};
      for (std::size_t d = 0; d < strides.size(); ++d) {
        copy.source_offset += (common->offsets[d] - block.box.offsets[d]) * block.strides[d];
        copy.target_offset += common->offsets[d] * strides[d];
      }
      simplify(copy);
      if (narrow(copy, share)) read_copy(work, std::move(copy));
    }
  });
  pool_.give_back(std::move(scratch));
}

/// Makes a copy have fewer dimensions: removes dimensions of size 1, and joins a dimension with the
/// next one if together they have one constant stride in the source and in the window.
void ElementReader::simplify(Copy& copy) {
  Copy simple{{}, {}, {}, copy.source_offset, copy.target_offset};
  for (std::size_t d = 0; d < copy.sizes.size(); ++d) {
    if (copy.sizes[d] == 1) continue;
    if (!simple.sizes.empty() && simple.from.back() == copy.from[d] * copy.sizes[d] &&
        simple.to.back() == copy.to[d] * copy.sizes[d]) {
      simple.sizes.back() *= copy.sizes[d];
      simple.from.back() = copy.from[d];
      simple.to.back() = copy.to[d];
      continue;
    }
    simple.sizes.push_back(copy.sizes[d]);
    simple.from.push_back(copy.from[d]);
    simple.to.push_back(copy.to[d]);
  }
  copy = std::move(simple);
}

/// Reduces a copy to one of its shares, along the dimension with the largest stride in the source.
/// Returns whether the share has elements.
bool ElementReader::narrow(Copy& copy, Share share) {
  if (share.count == 1) return true;
  if (copy.sizes.empty()) return share.number == 0;
  const auto d = static_cast<std::size_t>(std::ranges::max_element(copy.from) - copy.from.begin());
  const std::int64_t begin = copy.sizes[d] * share.number / share.count;
  const std::int64_t end = copy.sizes[d] * (share.number + 1) / share.count;
  copy.sizes[d] = end - begin;
  copy.source_offset += begin * copy.from[d];
  copy.target_offset += begin * copy.to[d];
  return begin != end;
}

void ElementReader::read_copy(const Work& work, Copy copy) const {
  if (work.tensor == kConstant) return fill(work, copy);
  std::vector<std::size_t> order(copy.sizes.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(
      order, [&](std::size_t a, std::size_t b) { return copy.from[a] > copy.from[b]; });
  // Finds the dimensions with the smallest strides in the source, which are read together.
  std::size_t first = order.size();
  std::int64_t span = 1;
  std::int64_t chunk = 1;  // how many positions of the next dimension are read together
  const auto limit = static_cast<std::int64_t>(kScratchNbytes / work.itemsize);
  for (; first > 0; --first) {
    const std::size_t d = order[first - 1];
    const std::int64_t gap = copy.from[d] - span;
    const bool is_near = gap <= 0 || nbytes(gap, work.itemsize) <= kMaxGapNbytes;
    if (!is_near) break;
    const bool is_direct = first == order.size() && copy.from[d] == 1 && copy.to[d] == 1;
    const std::int64_t fits = 1 + (limit - span) / std::max<std::int64_t>(copy.from[d], 1);
    if (!is_direct && fits < copy.sizes[d]) {
      chunk = std::max<std::int64_t>(fits, 1);
      break;
    }
    span += (copy.sizes[d] - 1) * copy.from[d];
    if (is_direct && span > limit) {
      --first;
      break;
    }
  }
  Copy inner;
  const bool has_chunks = chunk > 1;
  for (std::size_t i = has_chunks ? first - 1 : first; i < order.size(); ++i) {
    inner.sizes.push_back(copy.sizes[order[i]]);
    inner.from.push_back(copy.from[order[i]]);
    inner.to.push_back(copy.to[order[i]]);
  }
  Shape outer;
  for (std::size_t i = 0; i < first; ++i) {
    const std::int64_t size = copy.sizes[order[i]];
    outer.push_back(has_chunks && i + 1 == first ? (size + chunk - 1) / chunk : size);
  }
  Odometer odometer(outer);
  do {
    inner.source_offset = copy.source_offset;
    inner.target_offset = copy.target_offset;
    for (std::size_t i = 0; i < first; ++i) {
      const bool is_chunk = has_chunks && i + 1 == first;
      const std::int64_t at = odometer.at()[i] * (is_chunk ? chunk : 1);
      inner.source_offset += at * copy.from[order[i]];
      inner.target_offset += at * copy.to[order[i]];
      if (is_chunk) inner.sizes[0] = std::min(chunk, copy.sizes[order[i]] - at);
    }
    read_inner(work, inner);
  } while (odometer.next());
}

/// Reads elements that are near one another in the source, in one read. The dimensions of `inner`
/// are sorted by their strides in the source, largest first.
void ElementReader::read_inner(const Work& work, const Copy& inner) const {
  std::int64_t span = 1;
  for (std::size_t d = 0; d < inner.sizes.size(); ++d) {
    span += (inner.sizes[d] - 1) * inner.from[d];
  }
  const FlatRange range{inner.source_offset, inner.source_offset + span};
  const std::size_t num_dims = inner.sizes.size();
  const auto at_target = static_cast<std::size_t>(nbytes(inner.target_offset, work.itemsize));
  const bool is_run = num_dims == 0 || (num_dims == 1 && inner.from[0] == 1 && inner.to[0] == 1);
  if (is_run) {
    const auto out = work.out.subspan(at_target, nbytes(span, work.itemsize));
    read_source(work, range, out);
    if (work.added != 0) require_finite(work, add_to(out, work.dtype, work.added));
    return;
  }
  const std::span<std::byte> elements = work.scratch.take(nbytes(span, work.itemsize));
  read_source(work, range, elements);
  if (work.added != 0 && add_to(elements, work.dtype, work.added).num_too_large > 0) {
    // The element whose sum is too large may be in a gap, and so not in the window.
    check_sums(work, inner);
  }
  // The column dimension has the smallest stride in the target. Of the others, the row dimension
  // has the smallest stride in the source.
  const auto column =
      static_cast<std::size_t>(std::ranges::min_element(inner.to) - inner.to.begin());
  std::size_t row = num_dims;
  for (std::size_t d = num_dims; d-- > 0;) {
    if (d != column && (row == num_dims || inner.from[d] < inner.from[row])) row = d;
  }
  const auto step = [&](const Shape& steps, std::size_t d) {
    return d == num_dims ? 0 : steps[d] * static_cast<std::int64_t>(work.itemsize);
  };
  const Plane plane{row == num_dims ? 1 : inner.sizes[row],
                    inner.sizes[column],
                    step(inner.from, row),
                    step(inner.to, row),
                    step(inner.from, column),
                    step(inner.to, column)};
  const bool has_runs = inner.from[column] == 1 && inner.to[column] == 1;
  Shape others;
  for (std::size_t d = 0; d < num_dims; ++d) {
    others.push_back(d == column || d == row ? 1 : inner.sizes[d]);
  }
  Odometer odometer(others);
  do {
    const std::byte* from =
        elements.data() + nbytes(flat_index(odometer.at(), inner.from), work.itemsize);
    std::byte* to =
        work.out.data() + at_target + nbytes(flat_index(odometer.at(), inner.to), work.itemsize);
    if (!has_runs) {
      copy_plane(plane, work.itemsize, from, to);
      continue;
    }
    for (std::int64_t r = 0; r < plane.rows; ++r) {
      std::memcpy(to + r * plane.row_to, from + r * plane.row_from,
                  nbytes(plane.columns, work.itemsize));
    }
  } while (odometer.next());
}

/// Throws if sums were too large for the dtype.
void ElementReader::require_finite(const Work& work, const CastLosses& losses) const {
  if (losses.num_too_large == 0) return;
  using tessera::detail::float_to_text;
  const std::string& fqn = source_.contents().tensors[work.tensor].meta.fqn;
  throw Error::expected(ErrorKind::mismatch, {.path = path_, .fqn = fqn}, "add",
                        "sums up to " + float_to_text(largest_finite(work.dtype)) +
                            ", the largest number of " + std::string(dtype_name(work.dtype)),
                        std::to_string(losses.num_too_large) + " larger, up to " +
                            float_to_text(losses.largest_magnitude),
                        "cast the source to a dtype with a larger range first");
}

/// Repeats the addition for those elements of the source that the window takes, one by one, and
/// throws if a sum is too large for the dtype.
void ElementReader::check_sums(const Work& work, const Copy& inner) const {
  CastLosses losses;
  std::vector<std::byte> element(work.itemsize);
  Odometer odometer(inner.sizes);
  do {
    const std::int64_t at = inner.source_offset + flat_index(odometer.at(), inner.from);
    read_source(work, {at, at + 1}, element);
    losses.merge(add_to(element, work.dtype, work.added));
  } while (losses.num_too_large == 0 && odometer.next());
  require_finite(work, losses);
}

void ElementReader::fill(const Work& work, const Copy& copy) const {
  const auto element = bytes_of_number(work.added, work.dtype);
  TESSERA_CHECK(element.has_value());  // checked before, when the recipe was applied
  Odometer odometer(copy.sizes);
  do {
    const std::int64_t at = copy.target_offset + flat_index(odometer.at(), copy.to);
    std::memcpy(work.out.data() + nbytes(at, work.itemsize), element->data(), element->size());
  } while (odometer.next());
}

void ElementReader::read_source(const Work& work, FlatRange range, std::span<std::byte> out) const {
  const auto& index = pieces_[work.tensor];
  if (!index) return source_.read_piece(work.tensor, 0, range, out);
  std::unique_ptr<ByteBuffer> scratch = pool_.take();
  const std::vector<std::uint32_t> pieces = index->pieces_sharing(range, 0);
  formats::detail::Gatherer(source_, work.tensor, *scratch)
      .gather(pieces, range, {0, range.numel()}, out);
  pool_.give_back(std::move(scratch));
}

bool ElementReader::is_permuted(const BlockTensor& tensor) {
  constexpr std::uint64_t kSmallNbytes = std::uint64_t{64} << 10;
  const Shape strides = row_major_strides(tensor.shape);
  return std::ranges::any_of(tensor.blocks, [&](const Block& block) {
    if (block.source == kConstant ||
        nbytes(block.box.numel(), itemsize(tensor.dtype)) <= kSmallNbytes)
      return false;
    Copy copy{block.box.sizes, block.strides, strides, 0, 0};
    simplify(copy);
    return !copy.from.empty() &&
           (copy.from.back() != 1 || !std::ranges::is_sorted(copy.from, std::greater()));
  });
}

std::optional<std::vector<std::byte>> bytes_of_number(double number, DType dtype) {
  std::vector<std::byte> bytes(itemsize(dtype));
  if (dtype == DType::float8_e8m0fnu) return std::nullopt;  // this dtype has no zero
  if (number == 0 && !std::signbit(number)) return bytes;
  if (is_floating_point(dtype)) {
    if (!can_cast(DType::float64, dtype)) return std::nullopt;
    double back = 0;
    cast_elements(DType::float64, std::as_bytes(std::span(&number, 1)), dtype, bytes);
    cast_elements(dtype, bytes, DType::float64, std::as_writable_bytes(std::span(&back, 1)));
    return back == number ? std::optional(bytes) : std::nullopt;
  }
  constexpr double kMaxExact = 9007199254740992.0;
  if (is_complex(dtype) || number != std::trunc(number) || std::abs(number) > kMaxExact) {
    return std::nullopt;
  }
  const auto whole = static_cast<std::int64_t>(number);
  std::memcpy(bytes.data(), &whole, bytes.size());
  double back = 0;
  if (!can_cast(dtype, DType::float64)) return std::nullopt;
  cast_elements(dtype, bytes, DType::float64, std::as_writable_bytes(std::span(&back, 1)));
  return back == number ? std::optional(bytes) : std::nullopt;
}

}  // namespace tessera::recipe
