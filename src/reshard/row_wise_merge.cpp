#include "reshard/row_wise_merge.h"

#include <vector>

#include "base/cast.h"
#include "formats/gatherer.h"

namespace tessera::reshard {

using formats::TensorEntry;
using formats::detail::Gatherer;

CastLosses merge_rows(const formats::TensorSource& source, const MergedRows& rows,
                      MergeBuffers buffers, TooLarge too_large, std::span<std::byte> out) {
  const TensorCopy& copy = rows.copy;
  const TensorEntry& tensor = source.contents().tensors[copy.source_tensor];
  const DType source_dtype = tensor.meta.dtype;
  const auto num_shards = static_cast<std::int64_t>(copy.merged_widths.size());
  const std::int64_t num_rows = tensor.meta.numel() / num_shards;
  const auto row_range = as_flat_range(rows.region, Shape{num_rows});
  TESSERA_CHECK(row_range.has_value());  // row-wise state is cut by rows
  const std::int64_t first_row = row_range->begin + rows.window.begin;
  const auto numel = static_cast<std::size_t>(rows.window.numel());
  std::vector<double> sum(numel, 0.0);
  std::vector<double> shard(numel);
  double total_width = 0.0;
  for (std::size_t k = 0; k < copy.merged_widths.size(); ++k) {
    const std::int64_t first = static_cast<std::int64_t>(k) * num_rows + first_row;
    const std::span<std::byte> stored = buffers.shard_rows.take(numel * itemsize(source_dtype));
    Gatherer(source, copy.source_tensor, buffers.scratch)
        .gather(copy.source_pieces[rows.piece_index], FlatRange{first, first + rows.window.numel()},
                {0, rows.window.numel()}, stored);
    cast_elements(source_dtype, stored, DType::float64, std::as_writable_bytes(std::span(shard)));
    const auto width = static_cast<double>(copy.merged_widths[k]);
    for (std::size_t i = 0; i < numel; ++i) sum[i] += width * shard[i];
    total_width += width;
  }
  for (double& value : sum) value /= total_width;
  return cast_and_count(DType::float64, std::as_bytes(std::span(sum)), rows.dtype, out, too_large);
}

std::uint64_t merge_nbytes(std::int64_t numel, DType source_dtype) {
  return static_cast<std::uint64_t>(numel) * (itemsize(source_dtype) + 2 * sizeof(double));
}

}  // namespace tessera::reshard
