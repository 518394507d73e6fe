// Tests of the emulation itself: it runs kernels as CUDA defines them, and reports wrong kernels
// and races.
#include "cuda_on_cpu/cuda_on_cpu.h"

#include <gmock/gmock.h>

#include <numeric>
#include <set>
#include <vector>

#include "embedding_kernels/cuda/device_memory.h"
#include "embedding_kernels/cuda/launch.cuh"

namespace tessera::embedding::cuda {
namespace {

constexpr unsigned kFullWarp = ~0U;

class CudaOnCpuTest : public testing::Test {
 protected:
  void TearDown() override { cudaStreamSynchronize(nullptr); }  // runs pending cudaFreeAsync
};
using CudaOnCpuDeathTest = CudaOnCpuTest;

std::vector<int> on_host(const DeviceArray<int>& values) {
  std::vector<int> copied(static_cast<std::size_t>(values.numel()));
  check(cudaMemcpyAsync(copied.data(), values.data(), values.nbytes(), cudaMemcpyDeviceToHost,
                        nullptr),
        "copy");
  check(cudaStreamSynchronize(nullptr), "wait");
  return copied;
}

unsigned place() {
  return blockIdx.x * blockDim.x + threadIdx.x;
}

void write_places(int* out) {
  out[place()] = static_cast<int>(place() + 1000 * gridDim.x);
}

TEST_F(CudaOnCpuTest, EveryThreadOfEveryBlockRunsOnce) {
  const DeviceArray<int> out(3 * 96, nullptr);
  launch(write_places, 3, 96, 0, nullptr, out.data());
  std::vector<int> expected(3 * 96);
  std::iota(expected.begin(), expected.end(), 3000);
  EXPECT_EQ(on_host(out), expected);
}

void sum_over_lanes(int* out) {
  auto sum = static_cast<float>(place());
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kFullWarp, sum, distance);
  }
  out[place()] = static_cast<int>(sum);
}

TEST_F(CudaOnCpuTest, LanesOfAWarpExchangeNumbers) {
  const DeviceArray<int> out(128, nullptr);
  launch(sum_over_lanes, 2, 64, 0, nullptr, out.data());
  const std::vector<int> found = on_host(out);
  for (int i = 0; i < 128; ++i) {
    const int first = i / 32 * 32;
    EXPECT_EQ(found[static_cast<std::size_t>(i)], 32 * first + 31 * 16);
  }
}

void turn_around(int* out) {
  float* const shared = shared_floats();
  shared[threadIdx.x] = static_cast<float>(place());
  __syncwarp();
  out[place()] = static_cast<int>(shared[31 - threadIdx.x]);
}

TEST_F(CudaOnCpuTest, LanesSeeSharedMemoryAfterTheyMeet) {
  const DeviceArray<int> out(64, nullptr);
  launch(turn_around, 2, 32, 32 * sizeof(float), nullptr, out.data());
  const std::vector<int> found = on_host(out);
  for (int i = 0; i < 64; ++i) {
    EXPECT_EQ(found[static_cast<std::size_t>(i)], i / 32 * 32 + 31 - i % 32);
  }
}

#ifndef __SANITIZE_THREAD__  // ThreadSanitizer would report the race in `append`
void append(std::vector<unsigned>* order) {
  order->push_back(place());
}

TEST_F(CudaOnCpuTest, TheOrderOfLanesIsDrawn) {
  std::set<std::vector<unsigned>> orders;
  for (int i = 0; i < 3; ++i) {
    std::vector<unsigned> order;
    launch(append, 2, 64, 0, nullptr, &order);
    check(cudaStreamSynchronize(nullptr), "wait");
    EXPECT_EQ(order.size(), 128U);
    orders.insert(order);
  }
  EXPECT_EQ(orders.size(), 3U);
}
#endif

TEST_F(CudaOnCpuTest, StreamsRunWhenWaitedFor) {
  cudaStream_t other = nullptr;
  check(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "stream");
  int steps = 0;
  cuda_on_cpu::enqueue(other, [&] { steps += 1; });
  cuda_on_cpu::enqueue(other, [&] { steps *= 10; });
  check(cudaStreamSynchronize(nullptr), "wait");
  EXPECT_EQ(steps, 0);
  check(cudaStreamSynchronize(other), "wait");
  EXPECT_EQ(steps, 10);
  check(cudaStreamDestroy(other), "stream");
}

TEST_F(CudaOnCpuTest, ConfigurationsThatCudaRefusesAreErrors) {
  struct {
    unsigned num_blocks;
    int num_threads;
    std::size_t shared_nbytes;
  } const refused[] = {{0, 32, 0}, {1, 0, 0}, {1, 1025, 0}, {1, 32, 48 * 1024 + 1}};
  for (const auto& each : refused) {
    launch(write_places, each.num_blocks, each.num_threads, each.shared_nbytes, nullptr, nullptr);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
}

void run(void (*kernel)(int*), int* out, unsigned num_blocks = 1) {
  launch(kernel, num_blocks, 32, 0, nullptr, out);
  check(cudaStreamSynchronize(nullptr), "wait");
}

void half_of_a_warp_meets(int*) {
  if (threadIdx.x < 16) __syncwarp();
}
void meet_in_two_places(int*) {
  if (threadIdx.x < 16) {
    __syncwarp();
  } else {
    __shfl_xor_sync(kFullWarp, 0, 1);
  }
}
void half_of_a_mask(int*) {
  __shfl_xor_sync(0xFFFF, 0, 1);
}

TEST_F(CudaOnCpuDeathTest, LanesThatMeetAloneAbort) {
  EXPECT_DEATH(run(half_of_a_warp_meets, nullptr), "but the others have ended");
  EXPECT_DEATH(run(meet_in_two_places, nullptr), "the others at __shfl_xor_sync");
  EXPECT_DEATH(run(half_of_a_mask, nullptr), "the mask must select all lanes");
}

#ifdef __SANITIZE_ADDRESS__
void write_behind(int* out) {
  out[threadIdx.x + 1] = 0;
}
void write_behind_a_local(int* out) {
  int local[2] = {1, 2};
  int* volatile at = local;
  __syncwarp();
  at[threadIdx.x / 31 * 2] = 5;
  out[threadIdx.x] = at[0];
}

TEST_F(CudaOnCpuDeathTest, AddressSanitizerSeesDeviceMemoryAndStacksOfLanes) {
  const DeviceArray<int> out(32, nullptr);
  EXPECT_DEATH(run(write_behind, out.data()), "heap-buffer-overflow.*write_behind");
  EXPECT_DEATH(run(write_behind_a_local, out.data()), "stack-buffer-overflow.*behind_a_local");
}
#endif

#ifdef __SANITIZE_THREAD__
void race_of_lanes(int* out) {
  out[threadIdx.x / 2] = 1;
}
void race_of_blocks(int* out) {
  out[threadIdx.x] += 1;
}
/// After the first __syncwarp, two lanes write to one place: no __syncwarp orders the two writes.
void race_after_a_meeting(int* out) {
  __syncwarp();
  if (threadIdx.x < 2) out[0] = 1;
  __syncwarp();
}

/// ThreadSanitizer ends a process in which it has reported a race with exit code 66, not with 0.
void run_and_exit(void (*kernel)(int*), unsigned num_blocks) {
  const DeviceArray<int> out(32, nullptr);
  run(kernel, out.data(), num_blocks);
  std::exit(0);
}

TEST_F(CudaOnCpuDeathTest, ThreadSanitizerSeesRaces) {
  const testing::ExitedWithCode reported(66);
  EXPECT_EXIT(run_and_exit(race_of_lanes, 1), reported, "data race.*race_of_lanes");
  EXPECT_EXIT(run_and_exit(race_of_blocks, 2), reported, "data race.*race_of_blocks");
  EXPECT_EXIT(run_and_exit(race_after_a_meeting, 1), reported, "data race.*race_after");
}
#endif

}  // namespace
}  // namespace tessera::embedding::cuda
