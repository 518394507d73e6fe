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
    std::call_once(tile->filled, [&] {
      tile->bytes.resize(tile_nbytes);
      fill(range, tile->bytes);
    });
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
  auto tile = std::make_shared<Tile>();
  tile->tensor = tensor;
  tile->piece = piece;
  tile->number = number;
  tile->nbytes = nbytes;
  tiles_.push_front(tile);
  nbytes_ += nbytes;
  while (nbytes_ > kMaxNbytes && tiles_.size() > 1) {
    nbytes_ -= tiles_.back()->nbytes;
    tiles_.pop_back();
  }
  return tile;
}

}  // namespace tessera::recipe
