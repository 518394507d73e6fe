#include "formats/native/patch_reader.h"

#include <algorithm>
#include <string>

#include "base/byte_buffer.h"
#include "formats/native/stored_blocks.h"
#include "tessera/base/error.h"

namespace tessera::formats::native {
namespace {

constexpr std::uint64_t kNumbersPerBlock = kPlainBlockNbytes / sizeof(std::uint64_t);
constexpr std::uint64_t kRowsNbytes = std::uint64_t{1} << 20;

/// Reads block `block` of the numbers.
void read_number_block(const ReadableFile& file, const TensorMeta& meta, const StoredPatch& patch,
                       std::uint64_t block, std::vector<std::uint64_t>& numbers) {
  const BlockGrid grid = grid_of(patch.numbers);
  const ByteRange range = grid.block(block);
  numbers.resize(range.nbytes() / sizeof(std::uint64_t));
  read_plain_range(file, meta.fqn, patch.numbers, grid, range,
                   std::as_writable_bytes(std::span(numbers)));
}

}  // namespace

void read_row_numbers(const ReadableFile& file, const TensorMeta& meta, const StoredPatch& patch,
                      const PieceRows& rows,
                      const std::function<void(std::span<const std::uint64_t>)>& sink) {
  std::vector<std::uint64_t> numbers;
  std::uint64_t least = 0;  // that the next number may be
  const std::uint64_t num_blocks = grid_of(patch.numbers).num_blocks();
  for (std::uint64_t block = 0; block < num_blocks; ++block) {
    read_number_block(file, meta, patch, block, numbers);
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      if (numbers[i] >= least && numbers[i] < static_cast<std::uint64_t>(rows.num_rows)) {
        least = numbers[i] + 1;
        continue;
      }
      const std::uint64_t at = patch.numbers.begin + block * kPlainBlockNbytes + i * 8;
      throw Error::expected(
          ErrorKind::corruption,
          {.path = file.path(), .fqn = meta.fqn, .byte_range = ByteRange{at, at + 8}},
          "row of a patch",
          "a number of at least " + std::to_string(least) + " and below " +
              std::to_string(rows.num_rows),
          std::to_string(numbers[i]), "damaged");
    }
    sink(numbers);
  }
}

PatchReader::PatchReader(const ReadableFile& file, const TensorMeta& meta, const StoredPatch& patch,
                         const PieceRows& rows)
    : file_(file), meta_(meta), patch_(patch), rows_(rows) {
  read_row_numbers(file_, meta_, patch_, rows_, [&](std::span<const std::uint64_t> numbers) {
    first_numbers_.push_back(numbers.front());
  });
}

void PatchReader::apply(FlatRange range, std::span<std::byte> bytes) const {
  const auto begin = static_cast<std::uint64_t>(range.begin / rows_.row_numel);
  const auto end = static_cast<std::uint64_t>((range.end - 1) / rows_.row_numel + 1);
  const std::uint64_t element_nbytes =
      rows_.row_nbytes / static_cast<std::uint64_t>(rows_.row_numel);
  const ByteRange wanted{static_cast<std::uint64_t>(range.begin) * element_nbytes,
                         static_cast<std::uint64_t>(range.end) * element_nbytes};
  // The block with the row `begin` is the last one that starts at or before it.
  const auto after = std::ranges::upper_bound(first_numbers_, begin);
  auto block = static_cast<std::uint64_t>(after - first_numbers_.begin());
  if (block > 0) --block;
  thread_local std::vector<std::uint64_t> numbers;
  for (; block < first_numbers_.size() && first_numbers_[block] < end; ++block) {
    read_number_block(file_, meta_, patch_, block, numbers);
    const auto first = std::ranges::lower_bound(numbers, begin);
    const auto last = std::ranges::lower_bound(numbers, end);
    read_rows(block * kNumbersPerBlock + static_cast<std::uint64_t>(first - numbers.begin()),
              {first, last}, wanted, bytes);
  }
}

/// Copies rows of the patch to `bytes`, which are the bytes `wanted` of the piece. `first`: index
/// in the patch of the first of these rows. `numbers`: their numbers in the piece.
void PatchReader::read_rows(std::uint64_t first, std::span<const std::uint64_t> numbers,
                            ByteRange wanted, std::span<std::byte> bytes) const {
  thread_local tessera::detail::ByteBuffer buffer;
  const std::uint64_t row_nbytes = rows_.row_nbytes;
  const auto rows_per_read =
      static_cast<std::size_t>(std::max<std::uint64_t>(kRowsNbytes / row_nbytes, 1));
  for (std::size_t i = 0; i < numbers.size(); i += rows_per_read) {
    const auto part = numbers.subspan(i, std::min(rows_per_read, numbers.size() - i));
    const std::uint64_t at = (first + i) * row_nbytes;
    const auto rows = buffer.take(part.size() * row_nbytes);
    read_plain_range(file_, meta_.fqn, patch_.rows, grid_of(patch_.rows), {at, at + rows.size()},
                     rows);
    for (std::size_t r = 0; r < part.size(); ++r) {
      const std::uint64_t row_begin = part[r] * row_nbytes;
      const std::uint64_t begin = std::max(row_begin, wanted.begin);
      const std::uint64_t end = std::min(row_begin + row_nbytes, wanted.end);
      std::ranges::copy(rows.subspan(r * row_nbytes + begin - row_begin, end - begin),
                        bytes.begin() + static_cast<std::ptrdiff_t>(begin - wanted.begin));
    }
  }
}

}  // namespace tessera::formats::native
