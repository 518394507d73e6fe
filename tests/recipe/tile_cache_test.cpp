#include "recipe/tile_cache.h"

#include <gmock/gmock.h>

#include <array>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <thread>

namespace tessera::recipe {
namespace {

constexpr std::int64_t kNumel = 5000;

/// Fills one share of a tile: each element gets its own index.
void fill_share(FlatRange tile, int share, std::span<std::byte> out) {
  for (std::int64_t i = share; i < tile.numel(); i += TileCache::kNumShares) {
    const std::int64_t element = tile.begin + i;
    std::memcpy(out.data() + i * 8, &element, 8);
  }
}

std::vector<std::int64_t> read(TileCache& cache, FlatRange window, const TileCache::Fill& fill) {
  std::vector<std::int64_t> elements(static_cast<std::size_t>(window.numel()));
  cache.read(0, 0, kNumel, 8, window, fill, std::as_writable_bytes(std::span(elements)));
  return elements;
}

TEST(TileCacheTest, ThreadsFillATileTogetherAndOnce) {
  TileCache cache;
  std::array<std::atomic<int>, TileCache::kNumShares> num_fills{};
  const auto fill = [&](FlatRange tile, int share, std::span<std::byte> out) {
    ++num_fills[static_cast<std::size_t>(share)];
    fill_share(tile, share, out);
  };
  std::vector<std::thread> threads;
  std::atomic<int> num_wrong = 0;
  for (std::int64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      for (std::int64_t at = t * 100; at + 100 <= kNumel; at += 400) {
        const auto found = read(cache, {at, at + 100}, fill);
        for (std::int64_t i = 0; i < 100; ++i) {
          if (found[static_cast<std::size_t>(i)] != at + i) ++num_wrong;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_wrong, 0);
  for (const auto& count : num_fills) EXPECT_EQ(count, 1);
}

TEST(TileCacheTest, ATileThatCouldNotBeFilledIsFilledAgain) {
  TileCache cache;
  bool fails = true;
  const auto fill = [&](FlatRange tile, int share, std::span<std::byte> out) {
    if (fails && share == 3) throw std::runtime_error("no disk");
    fill_share(tile, share, out);
  };
  EXPECT_THROW(read(cache, {0, 10}, fill), std::runtime_error);
  fails = false;
  EXPECT_THAT(read(cache, {7, 9}, fill), testing::ElementsAre(7, 8));
}

}  // namespace
}  // namespace tessera::recipe
