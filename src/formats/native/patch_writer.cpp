#include "formats/native/patch_writer.h"

#include <algorithm>

#include "base/checked_math.h"
#include "base/digest.h"
#include "tessera/base/error.h"

namespace tessera::formats::native {

void BlockChecksums::add(std::uint64_t begin, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::uint64_t number = begin / grid_.block_nbytes;
    const ByteRange block = grid_.block(number);
    const auto part = bytes.first(std::min<std::uint64_t>(bytes.size(), block.end - begin));
    if (part.size() == block.nbytes()) {
      checksums_[number] = xxh3_64(part);
    } else {
      const std::lock_guard lock(mutex_);
      Partial& partial = partial_[number];
      partial.bytes.resize(block.nbytes());
      std::ranges::copy(part,
                        partial.bytes.begin() + static_cast<std::ptrdiff_t>(begin - block.begin));
      partial.num_taken += part.size();
      if (partial.num_taken == block.nbytes()) {
        checksums_[number] = xxh3_64(partial.bytes);
        partial_.erase(number);
      }
    }
    begin += part.size();
    bytes = bytes.subspan(part.size());
  }
}

const std::vector<std::uint64_t>& BlockChecksums::checksums() const {
  TESSERA_CHECK(partial_.empty());
  return checksums_;
}

PatchWriter::PatchWriter(const RowSet& changed, const PieceRows& rows, std::int64_t block_numel)
    : changed_(changed),
      rows_(rows),
      block_numel_(block_numel),
      numbers_(grid_of(empty_patch(static_cast<std::uint64_t>(changed.count()), rows).numbers)),
      rows_of_patch_(grid_of(empty_patch(static_cast<std::uint64_t>(changed.count()), rows).rows)) {
  TESSERA_CHECK(changed.num_rows() == rows.num_rows && changed.count() > 0);
  const std::int64_t block_rows = block_numel / rows.row_numel;
  std::uint64_t before = 0;
  for (std::int64_t row = 0; row < rows.num_rows; row += block_rows) {
    first_rows_.push_back(before);
    changed.for_each(row, std::min(row + block_rows, rows.num_rows), [&](auto) { ++before; });
  }
  first_rows_.push_back(before);
}

void PatchWriter::write_numbers(WritableFile& file, const StoredPatch& patch) {
  TESSERA_CHECK(patch.num_rows == static_cast<std::uint64_t>(changed_.count()));
  std::vector<std::uint64_t> numbers;
  std::uint64_t begin = 0;
  const auto write = [&] {
    const auto bytes = std::as_bytes(std::span(numbers));
    file.write_at(patch.numbers.begin + begin, bytes);
    numbers_.add(begin, bytes);
    begin += bytes.size();
    numbers.clear();
  };
  changed_.for_each(0, rows_.num_rows, [&](std::int64_t row) {
    numbers.push_back(static_cast<std::uint64_t>(row));
    if (numbers.size() * sizeof(std::uint64_t) == kPlainBlockNbytes) write();
  });
  if (!numbers.empty()) write();
}

ByteRange PatchWriter::range_of_block(std::int64_t begin) const {
  const auto block = static_cast<std::size_t>(begin / block_numel_);
  return {first_rows_[block] * rows_.row_nbytes, first_rows_[block + 1] * rows_.row_nbytes};
}

ByteRange PatchWriter::place_of_block(const StoredPatch& patch, std::int64_t begin) const {
  const ByteRange range = range_of_block(begin);
  return {patch.rows.begin + range.begin, patch.rows.begin + range.end};
}

void PatchWriter::select(std::int64_t begin, std::span<const std::byte> block,
                         std::span<std::byte> out) const {
  const std::int64_t first = begin / rows_.row_numel;
  const auto num_rows = static_cast<std::int64_t>(block.size() / rows_.row_nbytes);
  changed_.for_each(first, first + num_rows, [&](std::int64_t row) {
    const auto bytes =
        block.subspan(static_cast<std::uint64_t>(row - first) * rows_.row_nbytes, rows_.row_nbytes);
    std::ranges::copy(bytes, out.begin());
    out = out.subspan(bytes.size());
  });
}

void PatchWriter::add_rows(std::int64_t begin, std::span<const std::byte> rows) {
  rows_of_patch_.add(range_of_block(begin).begin, rows);
}

std::int64_t patched_block_numel(const PieceRows& rows, const NativeWriteOptions& options) {
  const auto block_rows = static_cast<std::int64_t>(
      std::max<std::uint64_t>(options.plain_block_nbytes / rows.row_nbytes, 1));
  return std::min(block_rows, rows.num_rows) * rows.row_numel;
}

}  // namespace tessera::formats::native
