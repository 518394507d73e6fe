#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>

namespace tessera::test {

/// Returns the seed of this run: TESSERA_TEST_SEED if it is set, else a new one. If a test calls
/// this function and fails, the seed is printed.
std::uint64_t test_seed();

/// A random number generator with the run's seed. Generators with different `stream` give different
/// numbers.
class Random {
 public:
  explicit Random(std::uint64_t stream = 0);

  /// Returns a random number in [begin, end). Requires: `begin < end`.
  std::int64_t between(std::int64_t begin, std::int64_t end);
  bool flip() { return between(0, 2) == 1; }
  std::string bytes(std::size_t nbytes);

 private:
  std::mt19937_64 engine_;
};

}  // namespace tessera::test
