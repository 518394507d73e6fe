#include "accelerator/accelerator.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "runtime/embedding/table_kernels.h"
#include "tessera/runtime/dist/launch.h"
#include "tessera/runtime/embedding/shard.h"

namespace tessera::test::accelerator {
namespace {

c10::cuda::CUDACachingAllocator::DeviceStats stats_of(at::Device device) {
  return c10::cuda::CUDACachingAllocator::getDeviceStats(device.index());
}

const std::optional<dist::LaunchEnvironment>& job() {
  static const auto found = dist::launch_environment(dist::process_environment);
  return found;
}

}  // namespace

/// Tests of tables run with Tessera's CUDA kernels, and with ATen's operators.
std::vector<std::string> modes() {
  return {"Gpu", "GpuWithAtensKernels"};
}
void begin(const std::string& mode) {
#ifdef TESSERA_HAS_CUDA_TABLES
  embedding::use_cuda_kernels();
#endif
  if (mode == "GpuWithAtensKernels") {
    embedding::register_table_kernels(at::kCUDA, embedding::aten_table_kernels);
  }
}
void end() {
  for (int index = 0; index < static_cast<int>(torch::cuda::device_count()); ++index) {
    torch::cuda::synchronize(index);
  }
}

int num_devices() {
  return static_cast<int>(torch::cuda::device_count());
}
at::Device device(int rank) {
  const int index = job() ? job()->local_rank % num_devices() : rank;
  return {at::kCUDA, static_cast<c10::DeviceIndex>(index)};
}
void set_current(at::Device device) {
  c10::cuda::set_device(device.index());
}
void synchronize(at::Device device) {
  torch::cuda::synchronize(device.index());
}
std::int64_t allocated_nbytes(at::Device device) {
  return stats_of(device).allocated_bytes[0].current;
}
std::int64_t peak_nbytes(at::Device device) {
  return stats_of(device).allocated_bytes[0].peak;
}
void reset_peak(at::Device device) {
  c10::cuda::CUDACachingAllocator::resetPeakStats(device.index());
}
std::int64_t pinned_nbytes() {
  return at::getHostAllocator(at::kCUDA)->get_stats().active_bytes.current;
}
/// Returns Gloo, which sends tensors of a GPU through the host.
dist::Transport transport_of(int /*rank*/) {
  return dist::gloo("lo");
}
std::optional<int> num_processes() {
  if (!job()) return std::nullopt;
  return job()->world_size;
}
dist::Mesh connect_processes(const dist::MeshOptions& options) {
  static const auto store = c10::make_intrusive<c10d::TCPStore>(
      job()->master_address,
      c10d::TCPStoreOptions{.port = static_cast<std::uint16_t>(job()->master_port),
                            .isServer = false});
  static int number = 0;  // number of the next mesh; equal on all ranks
  dist::MeshOptions its_options = options;
  its_options.transport = dist::gloo("lo");
  return dist::connect(
      c10::make_intrusive<c10d::PrefixStore>("mesh " + std::to_string(number++), store),
      job()->rank, job()->world_size, its_options);
}
bool knows_waiting_operators() {
  return false;
}
std::vector<std::string> take_waiting_operators(at::Device /*device*/) {
  return {};
}

}  // namespace tessera::test::accelerator
