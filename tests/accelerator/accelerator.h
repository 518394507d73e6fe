#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "runtime/support/ranks.h"
#include "tessera/runtime/dist/mesh.h"

/// The device of tests whose code is the same for the simulated device and for a GPU. Each of the
/// two binaries defines these functions.
namespace tessera::test::accelerator {

/// Returns the parameters of the tests: schedules of the simulated device, or ways to use a GPU.
std::vector<std::string> modes();
void begin(const std::string& mode);
/// Waits for all work. On the simulated device, the test fails if a race was found.
void end();

int num_devices();
/// Returns the device of a rank.
at::Device device(int rank = 0);
void set_current(at::Device device);
/// Waits for all work of one device. A rank must not wait for another rank's device: a collective
/// that runs there may be waiting for this rank.
void synchronize(at::Device device);
/// Returns the memory that tensors have on a device. Units: bytes.
std::int64_t allocated_nbytes(at::Device device);
/// Returns the most memory that tensors have had on a device since `reset_peak`. Units: bytes.
std::int64_t peak_nbytes(at::Device device);
void reset_peak(at::Device device);
/// Returns the pinned memory that tensors have on the host. Units: bytes.
std::int64_t pinned_nbytes();
/// Returns a transport between ranks that are threads. Rank r uses device r.
dist::Transport transport_of(int rank);
/// If a launcher started this process as one rank of several, returns their number.
std::optional<int> num_processes();
/// Connects this process to the other ranks' processes. Collective. Requires: `num_processes`.
dist::Mesh connect_processes(const dist::MeshOptions& options);
/// Returns whether `take_waiting_operators` works: on the simulated device, not on a GPU.
bool knows_waiting_operators();
/// Returns the operators of a device that made the host wait since the last call. Always empty
/// unless `knows_waiting_operators`.
std::vector<std::string> take_waiting_operators(at::Device device);

}  // namespace tessera::test::accelerator

namespace tessera::test {

/// How many bodies `on_devices` has run and left out in the current test.
struct BodyCounts {
  int run = 0;
  int left_out = 0;  // a launcher started another number of ranks
};
inline BodyCounts body_counts;

/// Runs each test once for each mode. A test whose bodies were all left out is skipped.
class AcceleratorTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    body_counts = {};
    if (accelerator::num_devices() == 0) GTEST_SKIP() << "no GPU";
    accelerator::begin(GetParam());
  }
  void TearDown() override {
    if (accelerator::num_devices() > 0) accelerator::end();
    if (body_counts.run == 0 && body_counts.left_out > 0) {
      GTEST_SKIP() << "needs another number of ranks than " << *accelerator::num_processes();
    }
  }
};

inline std::string name_of_mode(const ::testing::TestParamInfo<std::string>& info) {
  return info.param;
}

/// Runs `body` on `world_size` ranks that are threads, each with a device of its own: autograd runs
/// the backwards of one device on one thread, so two ranks on one device would deadlock. If a
/// launcher started this process, it is one rank, and may share its device. It then runs `body` if
/// the launcher started `world_size` processes, and leaves `body` out otherwise.
inline void on_devices(int world_size, const std::function<void(const dist::Mesh&)>& body,
                       const dist::MeshOptions& options = {}) {
  if (const std::optional<int> num_processes = accelerator::num_processes()) {
    if (*num_processes != world_size) {
      ++body_counts.left_out;
      return;
    }
    ++body_counts.run;
    accelerator::set_current(accelerator::device());
    body(accelerator::connect_processes(options));
    return;
  }
  if (accelerator::num_devices() < world_size) {
    GTEST_SKIP() << "needs " << world_size << " devices, found " << accelerator::num_devices();
  }
  ++body_counts.run;
  on_ranks(
      world_size,
      [&](const dist::Mesh& mesh) {
        accelerator::set_current(accelerator::device(mesh.rank()));
        body(mesh);
      },
      options, accelerator::transport_of);
}

/// For tests that work on any number of ranks. Returns the lesser of `wanted` and the devices.
inline int num_ranks(int wanted) {
  return std::min(wanted, accelerator::num_devices());
}

/// Returns a mesh with two replicas of the shards, for hybrid strategies.
inline dist::MeshOptions two_replicas() {
  return {.axes = {{"replicate", 2}, {"shard", -1}}};
}

}  // namespace tessera::test
