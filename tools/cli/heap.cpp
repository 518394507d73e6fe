#include "cli/heap.h"

#include <malloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace tessera::cli {

void let_heap_use_huge_pages() {
#if defined(__GLIBC__) && defined(MADV_HUGEPAGE)
  constexpr std::uintptr_t kHugePageNbytes = std::uintptr_t{2} << 20;
  constexpr int kRoomNbytes = 256 << 20;
  constexpr int kUsualPadNbytes = 128 << 10;  // as glibc has it
  constexpr int kMmapNbytes = 32 << 20;       // the largest that glibc takes

  const auto begin = reinterpret_cast<std::uintptr_t>(sbrk(0));
  mallopt(M_MMAP_THRESHOLD, kMmapNbytes);
  mallopt(M_TRIM_THRESHOLD, 2 * kRoomNbytes);
  mallopt(M_TOP_PAD, kRoomNbytes);
  void* volatile grown = std::malloc(std::size_t{1} << 20);  // more than the heap has at the start
  std::free(grown);
  mallopt(M_TOP_PAD, kUsualPadNbytes);
  const auto end = reinterpret_cast<std::uintptr_t>(sbrk(0));

  // The first two MiB and more are left as they are: most lists need no more.
  const std::uintptr_t huge_begin = (begin / kHugePageNbytes + 2) * kHugePageNbytes;
  if (huge_begin >= end) return;
  static_cast<void>(madvise(reinterpret_cast<void*>(huge_begin), end - huge_begin, MADV_HUGEPAGE));
#endif
}

}  // namespace tessera::cli
