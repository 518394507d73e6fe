#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/byte_buffer.h"
#include "base/cast.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

// Computes one row-wise state (a number per row) from the states of several column shards.
// row_wise_merge_plan.h decides when rows are merged.
namespace tessera::reshard {

/// The rows of merged state that one block of the destination consists of.
struct MergedRows {
  const TensorCopy& copy;   // its merged_widths are the weights of the mean
  std::size_t piece_index;  // which piece of the destination tensor
  Region region;            // the rows of that piece, counted in the merged tensor
  FlatRange window;         // which elements of `region` the block has
  DType dtype;              // of the destination tensor
};

/// The memory that merge_rows uses. Both buffers must outlive the call.
struct MergeBuffers {
  tessera::detail::ByteBuffer& shard_rows;  // the rows of one column shard
  tessera::detail::ByteBuffer& scratch;     // for the reads from `source`
};

/// Fills `out` with the mean of the column shards' rows, weighted by the widths of the shards.
/// Reads the rows from `source`, and computes in double precision. Returns how many numbers the
/// cast to the destination's dtype found too large or made zero. Thread-safe if each thread has its
/// own buffers. Units: `out` has the bytes of the elements `rows.window`, in `rows.dtype`.
/// Requires: `rows.copy.merged_widths` is not empty. Throws: what `source` throws.
CastLosses merge_rows(const formats::TensorSource& source, const MergedRows& rows,
                      MergeBuffers buffers, TooLarge too_large, std::span<std::byte> out);

/// Returns the bytes of memory that merge_rows needs for `numel` elements, in addition to `out` and
/// the scratch buffer.
std::uint64_t merge_nbytes(std::int64_t numel, DType source_dtype);

}  // namespace tessera::reshard
