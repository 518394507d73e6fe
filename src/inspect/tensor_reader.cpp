#include "tessera/inspect/tensor_reader.h"

#include <algorithm>
#include <cstring>
#include <set>

#include "base/byte_buffer.h"
#include "formats/gatherer.h"
#include "tessera/base/error.h"

namespace tessera::inspect {
namespace {

FlatRange extent_of(const Region& region, std::span<const std::int64_t> shape) {
  if (const auto range = as_flat_range(region, shape)) return *range;
  const Box& box = std::get<Box>(region);
  const Shape strides = row_major_strides(shape);
  FlatRange extent;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    extent.begin += box.offsets[d] * strides[d];
    extent.end += (box.offsets[d] + box.sizes[d] - 1) * strides[d];
  }
  ++extent.end;
  return extent;
}

void require_coverage(const formats::CheckpointReader& reader, const formats::TensorEntry& entry) {
  std::vector<Region> regions;
  for (const auto& piece : entry.pieces) regions.push_back(piece.region);
  const auto problems = check_coverage(regions, entry.meta.shape);
  if (problems.empty()) return;
  throw Error::expected(ErrorKind::corruption, {reader.path(), entry.meta.fqn, {}}, "coverage",
                        "every element in exactly one piece", problems.front().detail,
                        "missing rank files?");
}

}  // namespace

TensorReader::TensorReader(const formats::CheckpointReader& reader, std::size_t tensor_index)
    : reader_(reader),
      tensor_index_(tensor_index),
      meta_(reader.contents().tensors.at(tensor_index).meta) {
  const formats::TensorEntry& entry = reader.contents().tensors[tensor_index];
  require_coverage(reader, entry);
  const Region whole = FlatRange{0, meta_.numel()};
  std::set<FlatRange> dense_seen;
  std::set<Box> boxes_seen;
  for (std::uint32_t p = 0; p < entry.pieces.size(); ++p) {
    const Region& region = entry.pieces[p].region;
    if (numel_of(region) == 0) continue;
    const auto range = as_flat_range(region, meta_.shape);
    const bool is_first =
        range ? dense_seen.insert(*range).second : boxes_seen.insert(std::get<Box>(region)).second;
    if (!is_first) continue;  // a replica of a piece that is known already
    sources_.push_back({p, extent_of(region, meta_.shape), range.has_value(),
                        CopyRuns(meta_.shape, region, whole)});
  }
  std::sort(sources_.begin(), sources_.end(),
            [](const Source& a, const Source& b) { return a.extent < b.extent; });
  for (const Source& source : sources_) {
    pieces_.push_back(source.piece_index);
    reached_.push_back(reached_.empty() ? source.extent.end
                                        : std::max(reached_.back(), source.extent.end));
  }
}

void TensorReader::read(FlatRange window, std::span<std::byte> out) const {
  const std::uint64_t size = itemsize(meta_.dtype);
  TESSERA_CHECK(window.begin >= 0 && window.begin <= window.end && window.end <= meta_.numel() &&
                out.size() == static_cast<std::uint64_t>(window.numel()) * size);
  tessera::detail::ByteBuffer scratch_buffer;
  std::vector<CopyRuns::Run> runs;
  // Index of the first piece that may overlap the window.
  auto next = static_cast<std::size_t>(
      std::upper_bound(reached_.begin(), reached_.end(), window.begin) - reached_.begin());
  for (; next < sources_.size() && sources_[next].extent.begin < window.end; ++next) {
    const Source& source = sources_[next];
    if (source.extent.end <= window.begin) continue;
    if (source.is_dense) {
      const FlatRange common{std::max(window.begin, source.extent.begin),
                             std::min(window.end, source.extent.end)};
      reader_.read_piece(tensor_index_, source.piece_index,
                         {common.begin - source.extent.begin, common.end - source.extent.begin},
                         out.subspan(static_cast<std::size_t>(common.begin - window.begin) * size,
                                     static_cast<std::size_t>(common.numel()) * size));
      continue;
    }
    runs.clear();
    source.runs.for_each_in(window, [&](const CopyRuns::Run& run) { runs.push_back(run); });
    if (runs.empty()) continue;
    // The elements of the window that a piece holds are in one range of the piece, because the
    // elements of both are in row-major order.
    const FlatRange needed{runs.front().source_begin, runs.back().source_begin + runs.back().numel};
    const auto scratch = scratch_buffer.take(static_cast<std::size_t>(needed.numel()) * size);
    reader_.read_piece(tensor_index_, source.piece_index, needed, scratch);
    for (const CopyRuns::Run& run : runs) {
      std::memcpy(
          out.data() + static_cast<std::uint64_t>(run.destination_begin - window.begin) * size,
          scratch.data() + static_cast<std::uint64_t>(run.source_begin - needed.begin) * size,
          static_cast<std::uint64_t>(run.numel) * size);
    }
  }
}

void TensorReader::read(const Box& box, FlatRange window, std::span<std::byte> out) const {
  TESSERA_CHECK(!region_error(box, meta_.shape) && window.begin >= 0 &&
                window.begin <= window.end && window.end <= box.numel() &&
                out.size() == static_cast<std::uint64_t>(window.numel()) * itemsize(meta_.dtype));
  tessera::detail::ByteBuffer scratch;
  formats::detail::Gatherer(reader_, tensor_index_, scratch).gather(pieces_, box, window, out);
}

std::int64_t TensorReader::window_end(std::int64_t begin, std::int64_t max_numel) const {
  const std::int64_t end = std::min(meta_.numel(), begin + std::max<std::int64_t>(1, max_numel));
  const auto next = static_cast<std::size_t>(
      std::upper_bound(reached_.begin(), reached_.end(), begin) - reached_.begin());
  if (next == sources_.size() || !sources_[next].is_dense) return end;
  return std::min(end, sources_[next].extent.end);
}

void for_each_block(const TensorReader& tensor, std::uint64_t block_nbytes,
                    const BlockVisitor& visit) {
  const std::uint64_t size = itemsize(tensor.meta().dtype);
  const auto max_numel = static_cast<std::int64_t>(std::max<std::uint64_t>(1, block_nbytes / size));
  const std::int64_t numel = tensor.meta().numel();
  tessera::detail::ByteBuffer buffer;
  for (std::int64_t begin = 0; begin < numel;) {
    const std::int64_t end = tensor.window_end(begin, max_numel);
    const auto block = buffer.take(static_cast<std::size_t>(end - begin) * size);
    tensor.read({begin, end}, block);
    visit({begin, end}, block);
    begin = end;
  }
}

}  // namespace tessera::inspect
