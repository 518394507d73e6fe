#include "embedding_kernels/huge_pages.h"

#include <sys/mman.h>

#include <memory>

namespace tessera::embedding {

void prefer_huge_pages(std::span<std::byte> memory) {
#ifdef MADV_HUGEPAGE
  constexpr std::size_t kHugePageNbytes = std::size_t{2} << 20;
  void* begin = memory.data();
  std::size_t nbytes = memory.size();
  if (std::align(kHugePageNbytes, kHugePageNbytes, begin, nbytes) == nullptr) return;
  static_cast<void>(madvise(begin, nbytes / kHugePageNbytes * kHugePageNbytes, MADV_HUGEPAGE));
#else
  static_cast<void>(memory);
#endif
}

}  // namespace tessera::embedding
