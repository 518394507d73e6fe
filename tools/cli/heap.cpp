#include "cli/heap.h"

#include <malloc.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <cstdlib>
#include <memory>

namespace tessera::cli {

void let_heap_use_huge_pages() {
#if defined(__GLIBC__) && defined(MADV_HUGEPAGE)
  constexpr std::size_t kHugePageNbytes = std::size_t{2} << 20;
  constexpr int kRoomNbytes = 256 << 20;
  constexpr int kUsualPadNbytes = 128 << 10;  // glibc's default
  constexpr int kMmapNbytes = 32 << 20;       // the largest value that glibc accepts

  auto* const begin = static_cast<std::byte*>(sbrk(0));
  mallopt(M_MMAP_THRESHOLD, kMmapNbytes);
  mallopt(M_TRIM_THRESHOLD, 2 * kRoomNbytes);
  mallopt(M_TOP_PAD, kRoomNbytes);
  void* volatile grown = std::malloc(std::size_t{1} << 20);  // larger than the heap at the start
  std::free(grown);
  mallopt(M_TOP_PAD, kUsualPadNbytes);
  const auto nbytes = static_cast<std::size_t>(static_cast<std::byte*>(sbrk(0)) - begin);

  // The beginning of the heap, a little more than 2 MiB, keeps small pages, because most lists need
  // no more memory.
  if (nbytes <= kHugePageNbytes) return;
  void* huge_begin = begin + kHugePageNbytes;
  std::size_t huge_nbytes = nbytes - kHugePageNbytes;
  if (std::align(kHugePageNbytes, kHugePageNbytes, huge_begin, huge_nbytes) == nullptr) return;
  static_cast<void>(madvise(huge_begin, huge_nbytes, MADV_HUGEPAGE));
#endif
}

void use_one_heap_in_limited_memory() {
#if defined(__GLIBC__)
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
    mallopt(M_ARENA_MAX, 1);
  }
#endif
}

}  // namespace tessera::cli
