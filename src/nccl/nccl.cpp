#include "tessera/runtime/dist/mesh.h"

#include <c10/cuda/CUDAFunctions.h>

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <exception>

#include "tessera/base/error.h"
#include "tessera/runtime/dist/launch.h"

namespace tessera::dist {
namespace {

c10::DeviceIndex checked(int index) {
  const int num_devices = c10::cuda::device_count();
  if (index < 0 || index >= num_devices) {
    throw Error::expected(
        ErrorKind::unsupported, {}, "NCCL", "a CUDA device with the index " + std::to_string(index),
        num_devices == 0 ? "no CUDA device" : std::to_string(num_devices) + " CUDA devices");
  }
  return static_cast<c10::DeviceIndex>(index);
}

/// Shuts NCCL down in its destructor, as destroy_process_group does in Python. Without `shutdown`,
/// the base class aborts running collectives and warns. If an exception propagates, the destructor
/// does not call `shutdown`, which would wait for other ranks, and these may be dead.
class NcclBackend final : public c10d::ProcessGroupNCCL {
 public:
  using ProcessGroupNCCL::ProcessGroupNCCL;

  NcclBackend(const NcclBackend&) = delete;
  NcclBackend& operator=(const NcclBackend&) = delete;

  ~NcclBackend() override {
    if (std::uncaught_exceptions() > 0) return;
    try {
      shutdown();
    } catch (const std::exception& error) {
      TORCH_WARN("NCCL: shutdown failed: ", error.what());
    }
  }
};

int local_rank() {
  const auto found = launch_environment(process_environment);
  return found ? found->local_rank : 0;
}

}  // namespace

Transport nccl(std::optional<int> device_index) {
  const at::Device device(at::kCUDA, checked(device_index ? *device_index : local_rank()));
  c10::cuda::set_device(device.index());
  Transport transport;
  transport.name = "NCCL";
  transport.device = device;
  transport.connects_one_rank = true;
  transport.connect = [device](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                               std::chrono::milliseconds timeout) {
    auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
    options->timeout = timeout;
    auto backend = c10::make_intrusive<NcclBackend>(store, rank, size, options);
    backend->setBoundDeviceId(device);
    return backend;
  };
  return transport;
}

}  // namespace tessera::dist
