#include "embedding_kernels/huge_pages.h"

#include <gmock/gmock.h>
#include <sys/mman.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

namespace tessera::embedding {
namespace {

/// Returns the flags of the mapping that holds an address, as the system shows them.
std::string flags_of(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  bool is_found = false;
  for (std::string line; std::getline(maps, line);) {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    char dash = 0;
    if (std::istringstream(line) >> std::hex >> begin >> dash >> end && dash == '-') {
      const auto at = reinterpret_cast<std::uintptr_t>(address);
      is_found = begin <= at && at < end;
    } else if (is_found && line.starts_with("VmFlags:")) {
      return line;
    }
  }
  return {};
}

TEST(HugePagesTest, WholeOnesAreAskedForAndNoOthers) {
  if (!std::filesystem::exists("/sys/kernel/mm/transparent_hugepage")) {
    GTEST_SKIP() << "the system has no huge pages to ask for";
  }
  constexpr std::size_t kHugePage = std::size_t{2} << 20;
  void* mapped =
      mmap(nullptr, 8 * kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(mapped, MAP_FAILED);
  const auto address = reinterpret_cast<std::uintptr_t>(mapped);
  auto* first = static_cast<std::byte*>(mapped) + (kHugePage - address % kHugePage) % kHugePage;

  prefer_huge_pages({first + 100, 4 * kHugePage});  // three whole ones
  EXPECT_THAT(flags_of(first + 100), testing::Not(testing::HasSubstr(" hg")));
  for (std::size_t page = 1; page <= 3; ++page) {
    EXPECT_THAT(flags_of(first + page * kHugePage), testing::HasSubstr(" hg")) << page;
  }
  EXPECT_THAT(flags_of(first + 4 * kHugePage), testing::Not(testing::HasSubstr(" hg")));

  prefer_huge_pages({first + 5 * kHugePage + 1, kHugePage});  // none
  EXPECT_THAT(flags_of(first + 5 * kHugePage + 1), testing::Not(testing::HasSubstr(" hg")));
  prefer_huge_pages({});
  munmap(mapped, 8 * kHugePage);
}

}  // namespace
}  // namespace tessera::embedding
