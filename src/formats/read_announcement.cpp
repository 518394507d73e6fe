#include "formats/read_announcement.h"

#include <optional>
#include <utility>

#include "formats/gatherer.h"
#include "object_store/url.h"

namespace tessera::formats {
namespace {

/// More bytes around the elements of a piece mean that they are a part of a larger storage.
constexpr std::uint64_t kMaxEnvelopeNbytes = std::uint64_t{64} << 10;
constexpr std::size_t kMaxRanges = std::size_t{1} << 20;  // of a file: about 50 bytes each

bool has_url(const TensorSource& source) {
  const auto* const reader = dynamic_cast<const CheckpointReader*>(&source);
  if (reader == nullptr) return false;
  for (const std::string& file : reader->data_files()) {
    if (object_store::is_url(file)) return true;
  }
  return false;
}

}  // namespace

ReadAnnouncement::ReadAnnouncement(const TensorSource& source) : source_(source) {
  if (has_url(source)) known_ = dynamic_cast<const KnownRanges*>(&source);
}

void ReadAnnouncement::add_tensor(std::size_t tensor_index) {
  if (!is_useful()) return;
  const TensorEntry& tensor = source_.contents().tensors[tensor_index];
  std::set<Region> seen;
  for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
    const Region& region = tensor.pieces[p].region;
    if (numel_of(region) == 0 || !seen.insert(region).second) continue;
    const FlatRange whole{0, numel_of(region)};
    add(tensor_index, p, std::span(&whole, 1));
  }
}

void ReadAnnouncement::add_gathered(std::size_t tensor_index, std::span<const std::uint32_t> pieces,
                                    const Region& destination, FlatRange window) {
  if (!is_useful()) return;
  const TensorEntry& tensor = source_.contents().tensors[tensor_index];
  const std::uint64_t item_nbytes = itemsize(tensor.meta.dtype);
  for (const std::uint32_t piece : pieces) {
    std::vector<FlatRange> reads;
    const CopyRuns runs(tensor.meta.shape, tensor.pieces[piece].region, destination);
    runs.for_each_in(window, [&](const CopyRuns::Run& run) {
      if (reads.size() > kMaxRanges) return;  // `add` refuses them
      const std::int64_t end = run.source_begin + run.numel;
      const bool continues =
          !reads.empty() && detail::is_small_gap(reads.back().end, run.source_begin, item_nbytes);
      if (continues) {
        reads.back().end = end;
      } else {
        reads.push_back({run.source_begin, end});
      }
    });
    add(tensor_index, piece, reads);
  }
}

void ReadAnnouncement::leave_out(std::size_t tensor_index, std::size_t piece_index) {
  if (!is_useful()) return;
  if (const auto known = known_->known_range(tensor_index, piece_index)) {
    left_out_.insert(known->path);
  }
}

void ReadAnnouncement::add(std::size_t tensor_index, std::size_t piece_index,
                           std::span<const FlatRange> reads) {
  if (reads.empty()) return;
  const auto known = known_->known_range(tensor_index, piece_index);
  if (!known || !object_store::is_url(known->path) || left_out_.contains(known->path)) return;
  const TensorEntry& tensor = source_.contents().tensors[tensor_index];
  const std::uint64_t item_nbytes = itemsize(tensor.meta.dtype);
  const std::uint64_t nbytes =
      static_cast<std::uint64_t>(numel_of(tensor.pieces[piece_index].region)) * item_nbytes;
  if (!known->bytes || known->bytes->nbytes() < nbytes ||
      known->bytes->nbytes() - nbytes > kMaxEnvelopeNbytes) {
    left_out_.insert(known->path);
    return;
  }
  std::vector<ByteRange>& ranges = ranges_[known->path];
  if (reads.size() > kMaxRanges - ranges.size()) {
    left_out_.insert(known->path);
    return;
  }
  const std::uint64_t begin = known->bytes->begin;
  const std::uint64_t envelope_nbytes = known->bytes->nbytes() - nbytes;
  for (const FlatRange read : reads) {
    ranges.push_back(
        {begin + static_cast<std::uint64_t>(read.begin) * item_nbytes,
         begin + static_cast<std::uint64_t>(read.end) * item_nbytes + envelope_nbytes});
  }
}

std::unique_ptr<object_store::AnnouncedReads> ReadAnnouncement::announce() {
  for (const std::string& path : left_out_) ranges_.erase(path);
  return std::make_unique<object_store::AnnouncedReads>(std::exchange(ranges_, {}));
}

}  // namespace tessera::formats
