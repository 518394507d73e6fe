#pragma once

namespace tessera::cli {

/// Makes the heap of the main thread grow in huge pages, if the kernel has them. A list of 100,000
/// tensors uses 100 MiB, and page faults for small pages took 40 % of the time. Small lists still
/// use small pages. Reserves 256 MiB of address space, but no memory. Only for commands that read
/// no elements, because the heap then also has blocks of up to 32 MiB, and keeps freed memory. Call
/// it once, before the work. Does nothing if the allocator is not glibc's.
void let_heap_use_huge_pages();

}  // namespace tessera::cli
