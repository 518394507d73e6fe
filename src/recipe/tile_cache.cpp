#include "recipe/tile_cache.h"

#include <algorithm>
#include <cstring>

namespace tessera::recipe {

void TileCache::read(std::size_t tensor, std::size_t piece, std::int64_t numel,
                     std::uint64_t itemsize, FlatRange window, const Fill& fill,
                     std::span<std::byte> out) {
  const auto tile_numel = static_cast<std::int64_t>(kTileNbytes / itemsize);
  for (std::int64_t at = window.begin; at < window.end;) {
    const std::int64_t number = at / tile_numel;
    const FlatRange range{number * tile_numel, std::min((number + 1) * tile_numel, numel)};
    const std::int64_t end = std::min(range.end, window.end);
    const auto tile_nbytes = static_cast<std::uint64_t>(range.numel()) * itemsize;
    const std::shared_ptr<Tile> tile = find(tensor, piece, number, tile_nbytes);
    fill_together(tile, range, fill);
    const auto offset = [&](std::int64_t element, std::int64_t begin) {
      return static_cast<std::size_t>(element - begin) * itemsize;
    };
    std::memcpy(out.data() + offset(at, window.begin), tile->bytes.data() + offset(at, range.begin),
                offset(end, at));
    at = end;
  }
}

std::shared_ptr<TileCache::Tile> TileCache::find(std::size_t tensor, std::size_t piece,
                                                 std::int64_t number, std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(tiles_, [&](const std::shared_ptr<Tile>& tile) {
    return tile->tensor == tensor && tile->piece == piece && tile->number == number;
  });
  if (found != tiles_.end()) {
    tiles_.splice(tiles_.begin(), tiles_, found);
    return tiles_.front();
  }
  // Removes old tiles first, so that the new tile can use the memory of one that no thread reads.
  tessera::detail::ByteBuffer unused;
  while (nbytes_ + nbytes > kMaxNbytes && !tiles_.empty()) {
    nbytes_ -= tiles_.back()->nbytes;
    if (tiles_.back().use_count() == 1) {
      // The last other thread may just have dropped the tile. Reading the count does not wait for
      // what that thread read before; counting up and down does.
      { const std::shared_ptr<Tile> counted = tiles_.back(); }
      unused = std::move(tiles_.back()->buffer);
    }
    tiles_.pop_back();
  }
  auto tile = std::make_shared<Tile>();
  tile->tensor = tensor;
  tile->piece = piece;
  tile->number = number;
  tile->nbytes = nbytes;
  tile->buffer = std::move(unused);
  tile->bytes = tile->buffer.take(nbytes);
  tiles_.push_front(tile);
  nbytes_ += nbytes;
  return tile;
}

void TileCache::fill_together(const std::shared_ptr<Tile>& tile, FlatRange range,
                              const Fill& fill) {
  for (int share = tile->next_share++; share < kNumShares; share = tile->next_share++) {
    std::exception_ptr error;
    try {
      fill(range, share, tile->bytes);
    } catch (...) {
      error = std::current_exception();
    }
    const std::lock_guard lock(tile->mutex);
    if (error && !tile->error) tile->error = error;
    if (++tile->num_filled == kNumShares) tile->is_full.notify_all();
  }
  std::unique_lock lock(tile->mutex);
  tile->is_full.wait(lock, [&] { return tile->num_filled == kNumShares; });
  if (!tile->error) return;
  lock.unlock();
  forget(tile);
  std::rethrow_exception(tile->error);
}

void TileCache::forget(const std::shared_ptr<Tile>& tile) {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find(tiles_, tile);
  if (found == tiles_.end()) return;
  nbytes_ -= tile->nbytes;
  tiles_.erase(found);
}

}  // namespace tessera::recipe
