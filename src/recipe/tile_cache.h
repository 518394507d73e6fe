#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>

#include "base/byte_buffer.h"
#include "tessera/layout/region.h"

namespace tessera::recipe {

/// Keeps the most recently used tiles of permuted (transposed) tensors. A tile is a range of a
/// tensor's elements that contains many windows (ranges to read). A window of a permuted tensor
/// needs elements from all over the source. So the first read fills the whole tile, and the next
/// windows are copied from it. Threads that need the same tile fill it together. Thread-safe.
class TileCache {
 public:
  static constexpr std::uint64_t kTileNbytes = std::uint64_t{32} << 20;
  static constexpr std::uint64_t kMaxNbytes = std::uint64_t{64} << 20;
  static constexpr int kNumShares = 8;  // a tile is filled in this many shares, by several threads

  /// Fills share number `share` of a tile, from 0 to kNumShares - 1.
  using Fill = std::function<void(FlatRange tile, int share, std::span<std::byte> out)>;

  /// Fills `out` with the elements `window` of a piece of `numel` elements, from tiles. `tensor`
  /// and `piece` are the cache's key: for equal keys, `fill` must give equal elements. Throws: what
  /// `fill` throws; the next read of the tile then fills it again.
  void read(std::size_t tensor, std::size_t piece, std::int64_t numel, std::uint64_t itemsize,
            FlatRange window, const Fill& fill, std::span<std::byte> out);

 private:
  struct Tile {
    std::size_t tensor;
    std::size_t piece;
    std::int64_t number;
    std::uint64_t nbytes = 0;
    tessera::detail::ByteBuffer buffer;
    std::span<std::byte> bytes;
    std::atomic<int> next_share = 0;
    std::mutex mutex;  // guards the members below
    std::condition_variable is_full;
    int num_filled = 0;
    std::exception_ptr error;  // error of the first share that failed
  };

  std::shared_ptr<Tile> find(std::size_t tensor, std::size_t piece, std::int64_t number,
                             std::uint64_t nbytes);
  void fill_together(const std::shared_ptr<Tile>& tile, FlatRange range, const Fill& fill);
  void forget(const std::shared_ptr<Tile>& tile);

  std::mutex mutex_;
  // Most recently used first. Shared: threads may read a tile after its removal.
  std::list<std::shared_ptr<Tile>> tiles_;
  std::uint64_t nbytes_ = 0;
};

}  // namespace tessera::recipe
