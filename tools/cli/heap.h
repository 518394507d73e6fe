#pragma once

namespace tessera::cli {

/// Makes the heap of the main thread grow in huge pages, if the kernel has them. A list of 100,000
/// tensors uses 100 MiB, and page faults for small pages took 40 % of the time. Small lists still
/// use small pages. Reserves 256 MiB of address space, but no memory. Only for commands that read
/// no elements, because the heap then also has blocks of up to 32 MiB, and keeps freed memory. Call
/// it once, before the work. Does nothing if the allocator is not glibc's.
void let_heap_use_huge_pages();

/// If the address space is limited (`ulimit -v`), lets all threads share one heap. Otherwise each
/// thread reserves 64 MiB for a heap of its own, or gets every small block as a page of its own if
/// so much is not free. Then a call of HDF5, which crashes without memory, needs far more of it.
/// Call it before the first thread starts.
void use_one_heap_in_limited_memory();

}  // namespace tessera::cli
