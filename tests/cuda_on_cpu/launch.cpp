// Runs the lanes, warps and blocks of a launch.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "cuda_on_cpu/cuda_on_cpu.h"
#include "cuda_on_cpu/fiber.h"
#include "cuda_on_cpu/last_error.h"
#include "support/random.h"

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
#endif

namespace cuda_on_cpu {
namespace {

constexpr unsigned kWarpLanes = 32;
constexpr unsigned kMaxThreads = 1024;
constexpr std::size_t kMaxSharedNbytes = 48 * 1024;

// For ThreadSanitizer: accesses before `release(at)` happen before accesses after `acquire(at)`.
TESSERA_NOT_TRACED void release([[maybe_unused]] void* at) {
#ifdef __SANITIZE_THREAD__
  __tsan_release(at);
#endif
}
TESSERA_NOT_TRACED void acquire([[maybe_unused]] void* at) {
#ifdef __SANITIZE_THREAD__
  __tsan_acquire(at);
#endif
}

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "cuda_on_cpu: %s\n", what);
  std::abort();
}

void run_lane(Fiber& fiber);

struct Lane {
  Fiber fiber{run_lane};
  unsigned thread = 0;
  enum class State { ready, meets, over } state = State::over;
  Meeting meeting = Meeting::sync;
  unsigned num_meetings = 0;
  float given[2] = {};  // for `exchange`, by the parity of num_meetings: this and the previous
};

struct Warp {
  unsigned num_lanes = 0;
  unsigned num_meeting = 0;
  unsigned num_over = 0;
};

/// Memory of one block. No block gets the memory of another one, because ThreadSanitizer would
/// report that as a race: nothing synchronizes blocks.
struct BlockMemory {
  std::vector<float> shared;
  std::vector<char> meetings;  // two per warp, used in turns: the `at` of release and acquire
};

/// The launch that runs. Lanes use only the members before `lanes`, not the containers: library
/// code would show their accesses to ThreadSanitizer.
struct Processor {
  Lane* lane = nullptr;
  Lane* const* lane_of_thread = nullptr;
  const std::function<void()>* kernel = nullptr;
  unsigned block = 0;
  unsigned num_threads = 0;
  unsigned num_blocks = 0;
  float* shared = nullptr;
  char* meetings = nullptr;
  char begin = 0;  // lanes acquire it when they begin
  char end = 0;    // lanes release it when they end

  std::vector<std::unique_ptr<Lane>> lanes{};  // each block takes them in another order
  std::vector<Lane*> lanes_of_block{};
  std::vector<Lane*> ready{};
  std::vector<Warp> warps{};
  std::minstd_rand random{static_cast<std::minstd_rand::result_type>(tessera::test::test_seed())};
};

Processor* now = nullptr;

TESSERA_NOT_TRACED void run_lane(Fiber& fiber) {
  for (;;) {
    Lane& self = *now->lane;
    acquire(&now->begin);
    (*now->kernel)();
    release(&now->end);
    self.state = Lane::State::over;
    fiber.leave();
  }
}

TESSERA_NOT_TRACED void continue_lane(Lane& lane) {
  now->lane = &lane;
  threadIdx.x = lane.thread;
  blockIdx.x = now->block;
  blockDim.x = now->num_threads;
  gridDim.x = now->num_blocks;
  lane.fiber.enter();
}

/// Gives each thread of a block a lane, and makes all lanes ready.
void begin_block(unsigned num_threads) {
  while (now->lanes.size() < num_threads) now->lanes.push_back(std::make_unique<Lane>());
  std::shuffle(now->lanes.begin(), now->lanes.end(), now->random);
  now->warps.assign((num_threads + kWarpLanes - 1) / kWarpLanes, {});
  now->lanes_of_block.resize(num_threads);
  for (unsigned thread = 0; thread < num_threads; ++thread) {
    Lane& lane = *now->lanes[thread];
    lane.thread = thread;
    lane.state = Lane::State::ready;
    lane.num_meetings = 0;
    ++now->warps[thread / kWarpLanes].num_lanes;
    now->lanes_of_block[thread] = &lane;
  }
  now->ready = now->lanes_of_block;
  now->lane_of_thread = now->lanes_of_block.data();
}

/// If all lanes of a warp wait in `meet`, makes them ready. Aborts if lanes can never meet.
void end_meeting(unsigned first_thread, Warp& warp) {
  if (warp.num_meeting == 0 || warp.num_meeting + warp.num_over < warp.num_lanes) return;
  if (warp.num_over > 0) fail("some lanes of a warp wait, but the others have ended");
  for (unsigned i = 0; i < warp.num_lanes; ++i) {
    Lane& lane = *now->lane_of_thread[first_thread + i];
    if (lane.meeting != now->lane_of_thread[first_thread]->meeting) {
      fail("some lanes of a warp are at __syncwarp, the others at __shfl_xor_sync");
    }
    lane.state = Lane::State::ready;
    now->ready.push_back(&lane);
  }
  warp.num_meeting = 0;
}

void run_block(unsigned num_threads) {
  begin_block(num_threads);
  release(&now->begin);
  while (!now->ready.empty()) {
    Lane*& drawn = now->ready[now->random() % now->ready.size()];
    Lane& lane = *drawn;
    drawn = now->ready.back();
    now->ready.pop_back();
    continue_lane(lane);
    const unsigned warp = lane.thread / kWarpLanes;
    ++(lane.state == Lane::State::over ? now->warps[warp].num_over : now->warps[warp].num_meeting);
    end_meeting(warp * kWarpLanes, now->warps[warp]);
  }
}

void run_launch(unsigned num_blocks, unsigned num_threads, std::size_t shared_nbytes,
                const std::function<void()>& kernel) {
  static Processor processor;
  now = &processor;
  now->kernel = &kernel;
  now->num_threads = num_threads;
  now->num_blocks = num_blocks;
  std::vector<unsigned> blocks(num_blocks);
  std::iota(blocks.begin(), blocks.end(), 0U);
  std::shuffle(blocks.begin(), blocks.end(), now->random);
  std::vector<BlockMemory> memory(num_blocks);
  for (const unsigned block : blocks) {
    now->block = block;
    memory[block].shared.assign(shared_nbytes / sizeof(float),
                                std::numeric_limits<float>::quiet_NaN());
    memory[block].meetings.resize(2 * (num_threads / kWarpLanes + 1));
    now->shared = memory[block].shared.data();
    now->meetings = memory[block].meetings.data();
    run_block(num_threads);
  }
  acquire(&now->end);
}

}  // namespace

void launch(unsigned num_blocks, unsigned num_threads, std::size_t shared_nbytes,
            cudaStream_t stream, std::function<void()> kernel) {
  if (num_blocks == 0 || num_threads == 0 || num_threads > kMaxThreads ||
      shared_nbytes > kMaxSharedNbytes) {
    set_last_error(cudaErrorInvalidConfiguration);
    return;
  }
  enqueue(stream, [=, kernel = std::move(kernel)] {
    run_launch(num_blocks, num_threads, shared_nbytes, kernel);
  });
}

TESSERA_NOT_TRACED float* shared_floats() {
  return now->shared;
}

TESSERA_NOT_TRACED void meet(Meeting meeting, unsigned mask) {
  if (mask != ~0U) fail("the mask must select all lanes of the warp");
  Lane& self = *now->lane;
  // Two places, in turns: the next meeting's `release` must not count for lanes still in this one.
  char* const place = now->meetings + 2 * (self.thread / kWarpLanes) + self.num_meetings++ % 2;
  self.meeting = meeting;
  self.state = Lane::State::meets;
  release(place);
  self.fiber.leave();
  acquire(place);
}

TESSERA_NOT_TRACED float exchange(unsigned mask, float given, unsigned source) {
  Lane& self = *now->lane;
  const unsigned turn = self.num_meetings % 2;
  self.given[turn] = given;
  meet(Meeting::shuffle, mask);
  return now->lane_of_thread[self.thread / kWarpLanes * kWarpLanes + source]->given[turn];
}

}  // namespace cuda_on_cpu
