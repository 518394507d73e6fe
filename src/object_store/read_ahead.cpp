#include "object_store/read_ahead.h"

#include <algorithm>

namespace tessera::object_store {
namespace {

constexpr std::size_t kMaxStreams = 32;  // at least the number of threads that read
/// A read still continues a stream after a gap of at most this size: between two tensors there can
/// be padding, or small tensors that are not read.
constexpr std::uint64_t kMaxGapNbytes = std::uint64_t{1} << 20;
/// A read still continues a stream if it begins at most this far before the greatest end of the
/// reads so far: several threads that read one stream do not read in order.
constexpr std::uint64_t kMaxBackNbytes = std::uint64_t{64} << 20;

}  // namespace

std::optional<ByteRange> StreamFinder::note(ByteRange read, std::uint64_t file_nbytes) {
  const auto continues = [&](const Stream& stream) {
    const std::uint64_t end = std::max(stream.ahead_end, stream.next + kMaxGapNbytes);
    return read.begin >= stream.first && read.begin + kMaxBackNbytes >= stream.next &&
           read.begin <= end;
  };
  auto stream = std::ranges::find_if(streams_, continues);
  if (stream == streams_.end()) {
    if (streams_.size() == kMaxStreams) {
      streams_.erase(std::ranges::min_element(streams_, {}, &Stream::age));
    }
    streams_.push_back({read.begin, read.end, read.end, ++age_});
    return std::nullopt;
  }
  stream->age = ++age_;
  stream->next = std::max(stream->next, read.end);
  stream->ahead_end = std::max(stream->ahead_end, stream->next);
  const std::uint64_t nbytes_so_far = stream->next - stream->first;
  if (nbytes_so_far < sizes_.begin_ahead_nbytes) return ByteRange{read.end, read.end};
  const std::uint64_t wanted = std::min(nbytes_so_far, sizes_.ahead_nbytes);
  const std::uint64_t end = std::min(file_nbytes, stream->next + wanted);
  // Few requests: read ahead at least a window (or `wanted` if less), or up to the file's end.
  const bool is_worth_it =
      end == file_nbytes || end >= stream->ahead_end + std::min(wanted, sizes_.window_nbytes);
  if (end <= stream->ahead_end || !is_worth_it) return ByteRange{read.end, read.end};
  const ByteRange ahead{stream->ahead_end, end};
  stream->ahead_end = end;
  return ahead;
}

std::vector<ByteRange> in_parts(ByteRange range, std::uint64_t part_nbytes) {
  std::vector<ByteRange> parts;
  for (std::uint64_t begin = range.begin; begin < range.end; begin += part_nbytes) {
    parts.push_back({begin, std::min(range.end, begin + part_nbytes)});
  }
  return parts;
}

}  // namespace tessera::object_store
