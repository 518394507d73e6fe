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

/// Returns what each test runs under: schedules of the simulated device, or `Gpu`.
std::vector<std::string> modes();
void begin(const std::string& mode);
/// Waits for all work. The simulated device also expects that no access was out of order.
void end();

int num_devices();
/// Returns the device of a rank.
at::Device device(int rank = 0);
void set_current(at::Device device);
/// Waits for all work of one device. A rank waits for its own device only: what others have
/// launched may be a collective that this rank has not come to.
void synchronize(at::Device device);
/// Returns the memory that tensors have on a device. Units: bytes.
std::int64_t allocated_nbytes(at::Device device);
/// Returns the most memory that tensors have had on a device since `reset_peak`. Units: bytes.
std::int64_t peak_nbytes(at::Device device);
void reset_peak(at::Device device);
/// Returns the pinned memory that tensors have on the host. Units: bytes.
std::int64_t pinned_nbytes();
/// Connects a rank to others that are threads, each with the device of its own number.
dist::Transport transport_of(int rank);
/// If a launcher started this process as one rank of several, returns their number.
std::optional<int> num_processes();
/// Connects this process to the other ranks' processes. Collective. Requires: `num_processes`.
dist::Mesh connect_processes(const dist::MeshOptions& options);
/// Returns whether `take_waiting_operators` can find any: not on a GPU.
bool knows_waiting_operators();
/// Returns the operators of a device that made the host wait since the last call. Always empty
/// unless `knows_waiting_operators`.
std::vector<std::string> take_waiting_operators(at::Device device);

}  // namespace tessera::test::accelerator

namespace tessera::test {

/// What `on_devices` has done in the present test.
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

/// Runs `body` on ranks that are threads, each on a device of its own: autograd runs the backwards
/// of one device on one thread, so ranks on one device would wait for each other for ever. A
/// process that a launcher started is one rank and may share its device: it runs the bodies of that
/// many ranks, and no others.
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

/// Returns how many of the wanted ranks have a device, for tests that any number of ranks passes.
inline int num_ranks(int wanted) {
  return std::min(wanted, accelerator::num_devices());
}

/// Two replicas of the shards, for hybrid strategies.
inline dist::MeshOptions two_replicas() {
  return {.axes = {{"replicate", 2}, {"shard", -1}}};
}

}  // namespace tessera::test
