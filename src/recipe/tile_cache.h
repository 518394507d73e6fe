#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "tessera/layout/region.h"

namespace tessera::recipe {

/// Keeps the last parts of permuted tensors. A window of a permuted tensor needs elements from all
/// over the source, so a larger part is made at once, for the windows that follow. Thread-safe.
class TileCache {
 public:
  static constexpr std::uint64_t kTileNbytes = std::uint64_t{32} << 20;
  static constexpr std::uint64_t kMaxNbytes = std::uint64_t{64} << 20;

  /// Fills the elements of one tile.
  using Fill = std::function<void(FlatRange tile, std::span<std::byte> out)>;

  /// Fills `out` with the elements `window` of a tensor of `numel` elements, from tiles.
  void read(std::size_t tensor, std::size_t piece, std::int64_t numel, std::uint64_t itemsize,
            FlatRange window, const Fill& fill, std::span<std::byte> out);

 private:
  struct Tile {
    std::size_t tensor;
    std::size_t piece;
    std::int64_t number;
    std::once_flag filled;
    std::uint64_t nbytes = 0;
    std::vector<std::byte> bytes;  // empty until it is filled
  };

  std::shared_ptr<Tile> find(std::size_t tensor, std::size_t piece, std::int64_t number,
                             std::uint64_t nbytes);

  std::mutex mutex_;
  std::list<std::shared_ptr<Tile>> tiles_;  // the last used first; shared with readers of a tile
  std::uint64_t nbytes_ = 0;
};

}  // namespace tessera::recipe
