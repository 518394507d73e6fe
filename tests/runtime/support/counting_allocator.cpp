#include "runtime/support/counting_allocator.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <new>

namespace tessera::test {
namespace {

struct Counter {
  std::atomic<std::int64_t> now = 0;
  std::atomic<std::int64_t> peak = 0;
};

/// Returns this thread's counter. A shared_ptr, because another thread may free this thread's
/// memory after this thread has ended.
std::shared_ptr<Counter>& own_counter() {
  thread_local auto counter = std::make_shared<Counter>();
  return counter;
}

/// The header in front of each allocation. It holds what `free` needs, because libtorch requires
/// that the context of a DataPtr is the memory itself.
struct alignas(64) Header {
  std::int64_t nbytes;
  std::shared_ptr<Counter> counter;
};

class CountingAllocator final : public c10::Allocator {
 public:
  at::DataPtr allocate(std::size_t size) override {
    if (size == 0) return {nullptr, nullptr, &CountingAllocator::free, at::kCPU};
    void* const memory =
        std::aligned_alloc(alignof(Header), (sizeof(Header) + size + alignof(Header) - 1) /
                                                alignof(Header) * alignof(Header));
    if (memory == nullptr) throw std::bad_alloc();
    auto* const header = new (memory) Header{static_cast<std::int64_t>(size), own_counter()};
    Counter& counter = *header->counter;
    const std::int64_t now = counter.now += header->nbytes;
    counter.peak = std::max<std::int64_t>(counter.peak, now);
    return {header + 1, header + 1, &CountingAllocator::free, at::kCPU};
  }
  at::DeleterFnPtr raw_deleter() const override { return &CountingAllocator::free; }
  void copy_data(void* destination, const void* source, std::size_t size) const override {
    default_copy_data(destination, source, size);
  }

 private:
  static void free(void* data) {
    if (data == nullptr) return;
    Header* const header = static_cast<Header*>(data) - 1;
    header->counter->now -= header->nbytes;
    header->~Header();
    std::free(header);
  }
};

void install() {
  static const bool is_installed = [] {
    auto* const allocator = new CountingAllocator;  // never destroyed
    c10::SetCPUAllocator(allocator, /*priority=*/1);
    return true;
  }();
  static_cast<void>(is_installed);
}

}  // namespace

AllocatedMemory allocated_memory() {
  install();
  return {own_counter()->now, own_counter()->peak};
}

void reset_peak() {
  install();
  own_counter()->peak = own_counter()->now.load();
}

}  // namespace tessera::test
