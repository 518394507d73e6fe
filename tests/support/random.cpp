#include "support/random.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <iostream>

namespace tessera::test {
namespace {

std::atomic<bool> seed_was_used = false;

std::uint64_t choose_seed() {
  if (const char* text = std::getenv("TESSERA_TEST_SEED")) return std::strtoull(text, nullptr, 0);
  return std::random_device{}();
}

/// Prints the seed with which a test that failed can be repeated.
class SeedPrinter : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo&) override { seed_was_used = false; }
  void OnTestEnd(const ::testing::TestInfo& info) override {
    if (info.result()->Failed() && seed_was_used) {
      std::cerr << "repeat with TESSERA_TEST_SEED=" << test_seed() << "\n";
    }
  }
};

const bool printer_is_registered = [] {
  ::testing::UnitTest::GetInstance()->listeners().Append(new SeedPrinter);  // owned by gtest
  return true;
}();

}  // namespace

std::uint64_t test_seed() {
  static const std::uint64_t seed = choose_seed();
  seed_was_used = printer_is_registered;
  return seed;
}

Random::Random(std::uint64_t stream) {
  std::seed_seq seeds{test_seed(), test_seed() >> 32, stream, stream >> 32};
  engine_.seed(seeds);
}

std::int64_t Random::between(std::int64_t begin, std::int64_t end) {
  return std::uniform_int_distribution<std::int64_t>(begin, end - 1)(engine_);
}

std::string Random::bytes(std::size_t nbytes) {
  std::string text(nbytes, '\0');
  for (char& c : text) c = static_cast<char>(engine_());
  return text;
}

}  // namespace tessera::test
