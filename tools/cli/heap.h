#pragma once

namespace tessera::cli {

/// Lets the heap of the main thread grow into huge pages, where the kernel has them: a list of
/// 100,000 tensors touches 100 MiB, and a fault for each small page took 40 % of the time. Small
/// lists stay in small pages. Takes 256 MiB of address space, no memory. For commands that read no
/// elements: blocks of up to 32 MiB come from the heap then, which keeps what it is given back. To
/// be called once, before the work; does nothing where the allocator is another than glibc's.
void let_heap_use_huge_pages();

}  // namespace tessera::cli
