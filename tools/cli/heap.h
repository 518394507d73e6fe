#pragma once

namespace tessera::cli {

/// Lets the heap of the main thread grow in huge pages, if the kernel has them: a list of 100,000
/// tensors touches 100 MiB, and a fault for each small page took 40 % of the time. Small lists stay
/// in small pages. Takes 256 MiB of address space, but no memory. Only for commands that read no
/// elements, because the heap then also serves blocks of up to 32 MiB and keeps freed memory. Call
/// it once, before the work. Does nothing if the allocator is not glibc's.
void let_heap_use_huge_pages();

}  // namespace tessera::cli
