#include "reshard/work_shares.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

#include "base/checked_math.h"
#include "tessera/base/error.h"

namespace tessera::reshard {
namespace {

using Unit = formats::ShareWriter::Unit;

// How far an end of a share may move, in 1/1000 of the share.
constexpr std::uint64_t kShiftPerMille = 20;

/// Consecutive blocks of one file.
struct Extent {
  BlockRange blocks;
  std::uint64_t nbytes = 0;
};

std::vector<Extent> files_of(const std::vector<PieceExtent>& pieces) {
  std::vector<Extent> files;
  std::int64_t block = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (i == 0 || pieces[i].file != pieces[i - 1].file) files.push_back({{block, block}, 0});
    block += pieces[i].num_blocks;
    files.back().blocks.end = block;
    files.back().nbytes += pieces[i].nbytes;
  }
  return files;
}

std::uint64_t total_nbytes(const std::vector<PieceExtent>& pieces) {
  return std::accumulate(pieces.begin(), pieces.end(), std::uint64_t{0},
                         [](std::uint64_t sum, const PieceExtent& p) { return sum + p.nbytes; });
}

void add_range(BlocksOfShare& share, const Extent& extent) {
  if (extent.blocks.num_blocks() == 0) return;
  share.nbytes += extent.nbytes;
  if (!share.ranges.empty() && share.ranges.back().end == extent.blocks.begin) {
    share.ranges.back().end = extent.blocks.end;
  } else {
    share.ranges.push_back(extent.blocks);
  }
}

std::vector<BlocksOfShare> divide_files(const std::vector<PieceExtent>& pieces, int num_shares) {
  const std::vector<Extent> files = files_of(pieces);
  std::vector<std::size_t> order(files.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, std::ranges::greater(),
                           [&](std::size_t i) { return files[i].nbytes; });
  std::vector<std::uint64_t> nbytes(static_cast<std::size_t>(num_shares));
  std::vector<std::size_t> share_of(files.size());
  for (const std::size_t i : order) {
    const auto least = std::ranges::min_element(nbytes);
    *least += files[i].nbytes;
    share_of[i] = static_cast<std::size_t>(least - nbytes.begin());
  }
  std::vector<BlocksOfShare> shares(static_cast<std::size_t>(num_shares));
  for (std::size_t i = 0; i < files.size(); ++i) add_range(shares[share_of[i]], files[i]);
  return shares;
}

/// Returns the end of each share, as a position in the bytes of all blocks. If the end of a file is
/// near, the share ends there.
std::vector<std::uint64_t> share_ends(const std::vector<PieceExtent>& pieces, int num_shares) {
  const std::uint64_t total = total_nbytes(pieces);
  const auto number = static_cast<std::uint64_t>(num_shares);
  const std::uint64_t shift = total / number / 1000 * kShiftPerMille;
  std::vector<std::uint64_t> file_ends;
  std::uint64_t end = 0;
  for (const Extent& file : files_of(pieces)) file_ends.push_back(end += file.nbytes);
  std::vector<std::uint64_t> ends;
  for (std::uint64_t i = 1; i <= number; ++i) {
    // `total * i / number`, without an overflow.
    const std::uint64_t exact = total / number * i + total % number * i / number;
    ends.push_back(exact);
    const auto near =
        std::ranges::lower_bound(file_ends, exact < shift ? std::uint64_t{0} : exact - shift);
    if (near != file_ends.end() && *near <= exact + shift) ends.back() = *near;
  }
  if (!ends.empty()) ends.back() = total;
  return ends;
}

/// Divides the bytes evenly, and gives each block to the share that contains the block's middle.
std::vector<BlocksOfShare> divide_evenly(const std::vector<PieceExtent>& pieces, int num_shares) {
  const std::vector<std::uint64_t> ends = share_ends(pieces, num_shares);
  std::vector<BlocksOfShare> shares(static_cast<std::size_t>(num_shares));
  std::size_t share = 0;
  std::uint64_t begin_nbytes = 0;
  std::int64_t block = 0;
  for (const PieceExtent& piece : pieces) {
    std::uint64_t left = piece.nbytes;
    for (std::int64_t i = 0; i < piece.num_blocks; ++i, ++block) {
      const std::uint64_t nbytes = std::min(left, piece.block_nbytes);
      while (share + 1 < shares.size() && begin_nbytes + nbytes / 2 >= ends[share]) ++share;
      add_range(shares[share], {{block, block + 1}, nbytes});
      begin_nbytes += nbytes;
      left -= nbytes;
    }
  }
  return shares;
}

/// Sets `divides_file` of each share.
void find_divided_files(const std::vector<PieceExtent>& pieces,
                        std::vector<BlocksOfShare>& shares) {
  std::vector<std::int64_t> borders{0};
  for (const Extent& file : files_of(pieces)) borders.push_back(file.blocks.end);
  const auto is_border = [&](std::int64_t block) {
    return std::ranges::binary_search(borders, block);
  };
  for (BlocksOfShare& share : shares) {
    share.divides_file = std::ranges::any_of(share.ranges, [&](const BlockRange& range) {
      return !is_border(range.begin) || !is_border(range.end);
    });
  }
}

}  // namespace

std::vector<BlocksOfShare> divide_blocks(const std::vector<PieceExtent>& pieces, Unit unit,
                                         int num_shares) {
  TESSERA_CHECK(num_shares >= 1);
  std::vector<BlocksOfShare> shares =
      unit == Unit::file ? divide_files(pieces, num_shares) : divide_evenly(pieces, num_shares);
  find_divided_files(pieces, shares);
  return shares;
}

std::vector<BlocksOfShare> divide_blocks(const formats::ShareWriter& writer, int num_shares) {
  std::vector<PieceExtent> pieces;
  for (const auto id : writer.write_order()) {
    const formats::TensorEntry& tensor = writer.contents().tensors[id.tensor_index];
    const std::int64_t numel = numel_of(tensor.pieces[id.piece_index].region);
    const std::int64_t block_numel = writer.block_numel(id);
    const std::uint64_t element_nbytes = itemsize(tensor.meta.dtype);
    pieces.push_back({.num_blocks = ceil_div(numel, block_numel),
                      .block_nbytes = static_cast<std::uint64_t>(block_numel) * element_nbytes,
                      .nbytes = static_cast<std::uint64_t>(numel) * element_nbytes,
                      .file = writer.file_of(id)});
  }
  return divide_blocks(pieces, writer.unit(), num_shares);
}

}  // namespace tessera::reshard
