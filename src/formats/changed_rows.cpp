#include "tessera/formats/changed_rows.h"

#include <algorithm>
#include <bit>
#include <variant>

#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

constexpr std::uint64_t kMinPatchedNbytes = 65536;  // of the piece
constexpr std::uint64_t kMaxRowNbytes = std::uint64_t{1} << 20;
constexpr std::uint64_t kMinGain = 4;  // a patch has at most 1/kMinGain of the piece's bytes

}  // namespace

std::int64_t PieceRows::max_patch_rows() const {
  const std::uint64_t nbytes = static_cast<std::uint64_t>(num_rows) * row_nbytes;
  return static_cast<std::int64_t>(nbytes / kMinGain / (sizeof(std::uint64_t) + row_nbytes));
}

std::optional<PieceRows> rows_of(const Region& region, const TensorMeta& meta) {
  const auto* const box = std::get_if<Box>(&region);
  if (box == nullptr || box->sizes.empty() || box->sizes[0] < 2 || box->numel() == 0) return {};
  for (std::size_t d = 1; d < box->sizes.size(); ++d) {
    if (box->sizes[d] != meta.shape[d]) return {};
  }
  PieceRows rows{.num_rows = box->sizes[0], .row_numel = box->numel() / box->sizes[0]};
  rows.row_nbytes = static_cast<std::uint64_t>(rows.row_numel) * itemsize(meta.dtype);
  if (rows.row_nbytes > kMaxRowNbytes) return {};
  return rows;
}

std::optional<PieceRows> rows_to_patch(const Region& region, const TensorMeta& meta) {
  if (nbytes_of(region, meta.dtype) < kMinPatchedNbytes) return {};
  return rows_of(region, meta);
}

void RowSet::insert(std::int64_t row) {
  TESSERA_CHECK(row >= 0 && row < num_rows_);
  const auto bit = static_cast<std::size_t>(row);
  std::uint64_t& word = words_[bit / kBits];
  const std::uint64_t mask = std::uint64_t{1} << (bit % kBits);
  if ((word & mask) == 0) ++count_;
  word |= mask;
}

std::int64_t RowSet::next(std::int64_t row) const {
  if (row >= num_rows_) return num_rows_;
  const auto bit = static_cast<std::size_t>(row);
  std::size_t at = bit / kBits;
  std::uint64_t word = words_[at] >> (bit % kBits) << (bit % kBits);
  while (word == 0) {
    if (++at == words_.size()) return num_rows_;
    word = words_[at];
  }
  return static_cast<std::int64_t>(at * kBits) + std::countr_zero(word);
}

}  // namespace tessera::formats
