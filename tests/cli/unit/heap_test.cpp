#include "cli/heap.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>

namespace tessera::cli {
namespace {

/// Returns the VmFlags line of the mapping that contains `address`, from /proc/self/smaps.
std::string memory_flags(const void* address) {
  const auto wanted = reinterpret_cast<std::uintptr_t>(address);
  std::ifstream smaps("/proc/self/smaps");
  bool is_here = false;
  for (std::string line; std::getline(smaps, line);) {
    std::istringstream words(line);
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    char dash = 0;
    if (words >> std::hex >> begin >> dash >> end && dash == '-') {
      is_here = begin <= wanted && wanted < end;
    } else if (is_here && line.starts_with("VmFlags:")) {
      return line + " ";
    }
  }
  return {};
}

TEST(HeapTest, GrowsIntoHugePages) {
  let_heap_use_huge_pages();
  constexpr std::size_t kNbytes = std::size_t{8} << 20;
  const auto memory = std::make_unique<std::byte[]>(kNbytes);
  EXPECT_NE(memory_flags(memory.get() + kNbytes - 1).find(" hg "), std::string::npos)
      << memory_flags(memory.get() + kNbytes - 1);
}

}  // namespace
}  // namespace tessera::cli
