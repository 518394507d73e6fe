#include "formats/gatherer.h"

#include <cstring>

namespace tessera::formats::detail {

Gatherer::Gatherer(const TensorSource& source, std::size_t tensor_index,
                   tessera::detail::ByteBuffer& scratch)
    : source_(source),
      tensor_(source.contents().tensors[tensor_index]),
      tensor_index_(tensor_index),
      itemsize_(itemsize(tensor_.meta.dtype)),
      scratch_(scratch) {}

void Gatherer::gather(std::span<const std::uint32_t> pieces, const Region& destination,
                      FlatRange window, std::span<std::byte> out) {
  for (const std::uint32_t piece : pieces) {
    piece_ = piece;
    window_begin_ = window.begin;
    out_ = out;
    const CopyRuns runs(tensor_.meta.shape, tensor_.pieces[piece].region, destination);
    runs.for_each_in(window, [&](const CopyRuns::Run& run) { add(run); });
    flush();
  }
}

void Gatherer::add(const CopyRuns::Run& run) {
  if (!pending_.empty()) {
    const CopyRuns::Run& last = pending_.back();
    const std::int64_t span = run.source_begin + run.numel - pending_.front().source_begin;
    const bool is_near = is_small_gap(last.source_begin + last.numel, run.source_begin, itemsize_);
    if (!is_near || nbytes_of(span) > kGatherNbytes) flush();
  }
  pending_.push_back(run);
}

void Gatherer::flush() {
  if (pending_.empty()) return;
  const std::int64_t begin = pending_.front().source_begin;
  const std::int64_t end = pending_.back().source_begin + pending_.back().numel;
  if (pending_.size() == 1) {
    source_.read_piece(tensor_index_, piece_, {begin, end}, destination_of(pending_.front()));
  } else {
    const std::span<std::byte> source = scratch_.take(nbytes_of(end - begin));
    source_.read_piece(tensor_index_, piece_, {begin, end}, source);
    for (const CopyRuns::Run& run : pending_) {
      const std::span<std::byte> destination = destination_of(run);
      std::memcpy(destination.data(), source.data() + nbytes_of(run.source_begin - begin),
                  destination.size());
    }
  }
  pending_.clear();
}

}  // namespace tessera::formats::detail
