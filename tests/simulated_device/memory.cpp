#include "simulated_device/memory.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

namespace tessera::sim {
namespace {

constexpr std::size_t kArenaNbytes = std::size_t{16} << 30;  // of address space, not of memory
constexpr std::size_t kAlignment = 512;
constexpr std::size_t kGap = 4096;  // unused bytes after each block

struct Block {
  std::size_t offset, nbytes;
  c10::DeviceIndex device;
  Stream* stream;             // on which it was allocated
  std::set<Stream*> users{};  // other streams, that record_stream named
  AccessLog accesses{};       // since `restart`, also by earlier owners of the block
  bool is_allocated = false;
};

/// A freed block that other streams still use. It is free when all `events` are reached.
struct PendingFree {
  Block* block;
  std::vector<EventState> events;
};

/// What makes allocations of a device fail.
struct Limit {
  std::int64_t nbytes = std::numeric_limits<std::int64_t>::max();
  int num_allocations = -1;  // that succeed before one fails; -1: none fails
};

struct Arena {
  char* device_base = nullptr;
  char* kernel_base = nullptr;
  std::size_t end = 0;
  std::map<std::size_t, Block*> blocks;  // by offset
  // The freed blocks of each stream, by size. Of one size, the block that was freed last is taken
  // first.
  std::map<Stream*, std::map<std::size_t, std::vector<Block*>>> free;
  std::vector<PendingFree> pending;
  std::vector<MemoryUse> use;  // by device
  std::vector<Limit> limits;   // by device
};

Arena& arena() {
  static auto* const arena = new Arena;
  return *arena;
}

bool is_in_arena(const void* address) {
  const auto* const p = static_cast<const char*>(address);
  return p >= arena().device_base && p < arena().device_base + kArenaNbytes;
}

Block* block_of(const void* address) {
  const auto offset =
      static_cast<std::size_t>(static_cast<const char*>(address) - arena().device_base);
  const auto after = arena().blocks.upper_bound(offset);
  return after == arena().blocks.begin() ? nullptr : std::prev(after)->second;
}

/// Frees each pending block if all other streams that use it have reached their events.
void collect() {
  std::erase_if(arena().pending, [](const PendingFree& pending) {
    for (const EventState& event : pending.events) {
      if (event.stream->num_done < event.number) return false;
    }
    Block& block = *pending.block;
    for (const EventState& event : pending.events) join(block.stream->clock, event.clock);
    arena().free[block.stream][block.nbytes].push_back(&block);
    return true;
  });
}

/// Fills a block that is used again with bytes 0xFF (NaN, or -1), as a job of its own stream. If
/// another stream still uses the block, the two are a race.
void poison(Block& block) {
  enqueue(*block.stream, {.run = [offset = block.offset, nbytes = block.nbytes] {
    std::memset(arena().kernel_base + offset, 0xFF, nbytes);
  }});
  block.accesses.note(*block.stream, {0, block.nbytes}, AccessLog::Kind::write, "reuse");
}

/// Takes the smallest freed block of a stream with at least `nbytes` and less than twice as many
/// bytes. Returns nullptr if there is none.
Block* take_free_block(Stream& stream, std::size_t nbytes) {
  auto& by_size = arena().free[&stream];
  const auto found = by_size.lower_bound(nbytes);
  if (found == by_size.end() || found->first >= 2 * nbytes) return nullptr;
  Block* const block = found->second.back();
  found->second.pop_back();
  if (found->second.empty()) by_size.erase(found);
  poison(*block);
  return block;
}

Block* make_block(Stream& stream, std::size_t nbytes) {
  TORCH_CHECK(arena().end + nbytes <= kArenaNbytes, "sim: out of memory");
  auto* const block = new Block{
      .offset = arena().end, .nbytes = nbytes, .device = stream.device, .stream = &stream};
  arena().blocks[block->offset] = block;
  arena().end += nbytes + kGap;
  return block;
}

/// Throws if the device has no room for a block.
void check_room(c10::DeviceIndex device, std::size_t nbytes) {
  const auto at = static_cast<std::size_t>(device);
  Limit& limit = arena().limits[at];
  const std::int64_t left = limit.nbytes - arena().use[at].now;
  const bool is_chosen = limit.num_allocations == 0;
  if (limit.num_allocations >= 0) --limit.num_allocations;
  TORCH_CHECK_WITH(OutOfMemoryError, !is_chosen && static_cast<std::int64_t>(nbytes) <= left,
                   "sim: out of memory: tried to allocate ", nbytes,
                   " bytes on sim:", static_cast<int>(device));
}

void release(void* context) {
  if (context == nullptr) return;
  Block& block = *static_cast<Block*>(context);
  const std::lock_guard lock(streams().mutex);
  block.is_allocated = false;
  arena().use[static_cast<std::size_t>(block.device)].now -=
      static_cast<std::int64_t>(block.nbytes);
  std::vector<EventState> events;
  for (const Stream* const user : std::exchange(block.users, {})) {
    events.push_back(event_at_end(*user));
  }
  arena().pending.push_back({&block, std::move(events)});
  collect();
}

/// Works like torch's caching allocators, but splits no blocks: freed memory goes back at once to
/// the stream that allocated it, and later work of that stream may use it.
class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(std::size_t n) override {
    const c10::DeviceIndex device = current_device();
    if (n == 0) return {nullptr, nullptr, &release, {kSim, device}};
    const std::size_t nbytes = (n + kAlignment - 1) / kAlignment * kAlignment;
    Stream& stream = state_of(current_stream(device));
    const std::lock_guard lock(streams().mutex);
    check_room(device, nbytes);
    collect();
    Block* block = take_free_block(stream, nbytes);
    if (block == nullptr) block = make_block(stream, nbytes);
    block->is_allocated = true;
    MemoryUse& use = arena().use[static_cast<std::size_t>(device)];
    use.now += static_cast<std::int64_t>(block->nbytes);
    use.peak = std::max(use.peak, use.now);
    launched();
    return {arena().device_base + block->offset, block, &release, {kSim, device}};
  }
  void copy_data(void* /*to*/, const void* /*from*/, std::size_t /*n*/) const override {
    TORCH_CHECK(false, "sim: copy_data");
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t /*pool*/) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    record_stream(memory, stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    const MemoryUse use = memory_of(device);
    stats.allocated_bytes[0].current = use.now;
    stats.allocated_bytes[0].peak = use.peak;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak(device); }
};

/// Pinned memory. `read` is after the last copy from it, `written` after the last copy to it.
struct Pinned {
  std::size_t nbytes;
  EventState read{};
  EventState written{};
};

struct PinnedMemory {
  std::mutex mutex;
  std::map<const char*, Pinned> ranges;

  /// Requires: the mutex is held.
  Pinned* find(const void* address) {
    const auto* const p = static_cast<const char*>(address);
    auto it = ranges.upper_bound(p);
    if (it == ranges.begin()) return nullptr;
    --it;
    return p < it->first + it->second.nbytes ? &it->second : nullptr;
  }
};

PinnedMemory& pinned_memory() {
  static auto* const memory = new PinnedMemory;
  return *memory;
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t n) override {
    if (n == 0) return {nullptr, at::Device(at::kCPU)};
    void* const p = std::aligned_alloc(kGap, (n + kGap - 1) / kGap * kGap);
    TORCH_CHECK(p != nullptr, "sim: no pinned memory of ", n, " bytes");
    const std::lock_guard lock(pinned_memory().mutex);
    pinned_memory().ranges[static_cast<const char*>(p)] = {.nbytes = n};
    return {p, p, &PinnedAllocator::free, at::Device(at::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t n) const override {
    default_copy_data(to, from, n);
  }

 private:
  static void free(void* p) {
    const std::lock_guard lock(pinned_memory().mutex);
    pinned_memory().ranges.erase(static_cast<const char*>(p));
    std::free(p);
  }
};

DeviceAllocator& allocator() {
  static auto* const allocator = new DeviceAllocator;
  return *allocator;
}

}  // namespace

c10::Allocator* device_allocator() {
  return &allocator();
}

void record_stream(const c10::DataPtr& memory, const c10::Stream& stream) {
  if (memory.get() == nullptr) return;
  Stream& user = state_of(stream);
  const std::lock_guard lock(streams().mutex);
  Block* const block = block_of(memory.get());
  if (block->stream != &user) block->users.insert(&user);
}

bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSim;
}

const char* address_of(const at::Tensor& tensor) {
  const auto* const base = static_cast<const char*>(tensor.storage().data_ptr().get());
  if (base == nullptr) return nullptr;
  return base + tensor.storage_offset() * static_cast<std::int64_t>(tensor.element_size());
}

std::size_t extent_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
    last += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return static_cast<std::size_t>((last + 1) * tensor.element_size());
}

void* kernel_address(const void* device_address) {
  return arena().kernel_base + (static_cast<const char*>(device_address) - arena().device_base);
}

at::Tensor in_kernel(const at::Tensor& tensor) {
  if (!is_on_device(tensor)) return tensor;
  const char* const address = address_of(tensor);
  return at::from_blob(address == nullptr ? nullptr : kernel_address(address), tensor.sizes(),
                       tensor.strides(), at::TensorOptions(tensor.scalar_type()));
}

void check_memory(const at::Tensor& tensor, const std::string& name) {
  TORCH_CHECK(!is_on_device(tensor) || tensor.numel() == 0 || is_in_arena(address_of(tensor)),
              "sim: ", name, " of a tensor without device memory");
}

void note_access(Stream& stream, const at::Tensor& tensor, AccessLog::Kind kind,
                 const std::string& name) {
  if (!is_on_device(tensor) || tensor.numel() == 0) return;
  const char* const address = address_of(tensor);
  Block& block = *block_of(address);
  if (!block.is_allocated) report_race(name + " uses memory that has been freed");
  const auto begin = static_cast<std::size_t>(address - arena().device_base) - block.offset;
  block.accesses.note(stream, {begin, begin + extent_of(tensor)}, kind, name);
}

void forget_accesses() {
  for (const auto& [offset, block] : arena().blocks) block->accesses.clear();
}

c10::Allocator* pinned_allocator() {
  static auto* const allocator = new PinnedAllocator;
  return allocator;
}

bool is_pinned(const void* address) {
  const std::lock_guard lock(pinned_memory().mutex);
  return pinned_memory().find(address) != nullptr;
}

void note_pinned_copy(const void* address, const EventState& end, AccessLog::Kind kind) {
  const std::lock_guard lock(pinned_memory().mutex);
  Pinned* const pinned = pinned_memory().find(address);
  if (pinned != nullptr) (kind == AccessLog::Kind::read ? pinned->read : pinned->written) = end;
}

bool is_idle(const void* address, AccessLog::Kind kind) {
  EventState last;
  {
    const std::lock_guard lock(pinned_memory().mutex);
    if (const Pinned* const pinned = pinned_memory().find(address)) {
      last = kind == AccessLog::Kind::read ? pinned->read : pinned->written;
    }
  }
  if (last.stream == nullptr) return true;
  const std::lock_guard lock(streams().mutex);
  return last.stream->num_done >= last.number;
}

std::int64_t pinned_nbytes() {
  const std::lock_guard lock(pinned_memory().mutex);
  std::int64_t sum = 0;
  for (const auto& [address, range] : pinned_memory().ranges) {
    sum += static_cast<std::int64_t>(range.nbytes);
  }
  return sum;
}

MemoryUse memory_of(int device) {
  const std::lock_guard lock(streams().mutex);
  return arena().use.at(static_cast<std::size_t>(device));
}

void reset_peak(int device) {
  const std::lock_guard lock(streams().mutex);
  MemoryUse& use = arena().use.at(static_cast<std::size_t>(device));
  use.peak = use.now;
}

void limit_memory(int device, std::int64_t nbytes) {
  const std::lock_guard lock(streams().mutex);
  arena().limits.at(static_cast<std::size_t>(device)).nbytes = nbytes;
}

void fail_allocation_after(int device, int num_allocations) {
  const std::lock_guard lock(streams().mutex);
  arena().limits.at(static_cast<std::size_t>(device)).num_allocations = num_allocations;
}

void forget_limits() {
  std::ranges::fill(arena().limits, Limit{});
}

void register_memory(int num_devices) {
  arena().use.resize(static_cast<std::size_t>(num_devices));
  arena().limits.resize(static_cast<std::size_t>(num_devices));
  const int file = memfd_create("sim", 0);
  TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(kArenaNbytes)) == 0, "sim: memfd");
  const auto map = [&](int protection) {
    void* const p = mmap(nullptr, kArenaNbytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(p != MAP_FAILED, "sim: mmap");
    return static_cast<char*>(p);
  };
  arena().device_base = map(PROT_NONE);
  arena().kernel_base = map(PROT_READ | PROT_WRITE);
  close(file);
  c10::SetAllocator(kSim, &allocator());
}

}  // namespace tessera::sim
