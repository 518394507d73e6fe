#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "formats/known_ranges.h"
#include "object_store/announced_reads.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/layout/region.h"

namespace tessera::formats {

/// Collects the reads of a job in their order, and announces those of files at URLs, so that these
/// files are read ahead as far as the job needs them, and no further. Does nothing for local files,
/// and for formats that do not know where their pieces are (KnownRanges). `source` must outlive it.
/// Not thread-safe.
class ReadAnnouncement {
 public:
  explicit ReadAnnouncement(const TensorSource& source);

  /// Whether the source has files at URLs. If not, the other calls do nothing.
  bool is_useful() const { return known_ != nullptr; }
  /// Adds all elements of a tensor; of replicas, only the first.
  void add_tensor(std::size_t tensor_index);
  /// Adds what a Gatherer with the same arguments reads.
  void add_gathered(std::size_t tensor_index, std::span<const std::uint32_t> pieces,
                    const Region& destination, FlatRange window);
  /// Says that it is not known which elements of a piece will be read.
  void leave_out(std::size_t tensor_index, std::size_t piece_index);

  /// Call it once, at the end.
  std::unique_ptr<object_store::AnnouncedReads> announce();

 private:
  void add(std::size_t tensor_index, std::size_t piece_index, std::span<const FlatRange> reads);

  const TensorSource& source_;
  const KnownRanges* known_ = nullptr;
  std::map<std::string, std::vector<ByteRange>> ranges_;  // by path
  std::set<std::string> left_out_;  // paths of files of which not all reads are known
};

}  // namespace tessera::formats
