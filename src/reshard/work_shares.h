#pragma once

#include <cstdint>
#include <vector>

#include "tessera/formats/format_writer.h"

namespace tessera::reshard {

/// A half-open range of a writer's blocks (one call of write_block gives it one block), numbered in
/// the order of CheckpointWriter::write_order.
struct BlockRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t num_blocks() const { return end - begin; }
  friend bool operator==(const BlockRange&, const BlockRange&) = default;
};

/// The blocks of one share: ranges in ascending order with gaps between them, and their bytes.
struct BlocksOfShare {
  std::vector<BlockRange> ranges{};
  std::uint64_t nbytes = 0;
  bool divides_file = false;  // a file has blocks of this share and of another one
  friend bool operator==(const BlocksOfShare&, const BlocksOfShare&) = default;
};

/// The blocks of one piece, which follow each other.
struct PieceExtent {
  std::int64_t num_blocks = 0;
  std::uint64_t block_nbytes = 0;  // bytes of each block except the last one
  std::uint64_t nbytes = 0;        // bytes of all blocks
  std::size_t file = 0;  // number of the file with this piece; pieces of one file follow each other
};

/// Divides blocks into `num_shares` shares of about equal bytes. Each block is in exactly one
/// share. The result depends only on the arguments. With Unit::block, a share is one range of
/// blocks. Its bytes differ from the mean by at most one block. To let fewer files have two
/// writers, a share may begin or end at the end of a file; then its bytes differ by up to 4 % of
/// the mean more. With Unit::file, a share has whole files. Goes from the largest file to the
/// smallest, and gives each to the share with the fewest bytes so far.
std::vector<BlocksOfShare> divide_blocks(const std::vector<PieceExtent>& pieces,
                                         formats::ShareWriter::Unit unit, int num_shares);

/// Divides the blocks of a writer into shares, as the function above does.
std::vector<BlocksOfShare> divide_blocks(const formats::ShareWriter& writer, int num_shares);

}  // namespace tessera::reshard
