#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>

namespace tessera::test {

/// Returns the seed of this run: TESSERA_TEST_SEED where it is set, else a fresh one. When a test
/// fails after the seed was asked for, the seed is printed along with the failure.
std::uint64_t test_seed();

/// Draws everything from the run's seed. `stream` tells apart generators within one test.
class Random {
 public:
  explicit Random(std::uint64_t stream = 0);

  /// Draws from [begin, end). Requires: `begin < end`.
  std::int64_t between(std::int64_t begin, std::int64_t end);
  bool flip() { return between(0, 2) == 1; }
  std::string bytes(std::size_t nbytes);

 private:
  std::mt19937_64 engine_;
};

}  // namespace tessera::test
