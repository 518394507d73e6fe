#include "accelerator/accelerator.h"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

namespace tessera::test::accelerator {

std::vector<std::string> modes() {
  return {"Gpu"};
}
void begin(const std::string& /*mode*/) {}
void end() {
  for (int index = 0; index < num_devices(); ++index) torch::cuda::synchronize(index);
}

int num_devices() {
  return static_cast<int>(torch::cuda::device_count());
}
at::Device device(int index) {
  return {at::kCUDA, static_cast<c10::DeviceIndex>(index)};
}
void set_current(at::Device device) {
  c10::cuda::set_device(device.index());
}
void synchronize(at::Device device) {
  torch::cuda::synchronize(device.index());
}
std::int64_t allocated_nbytes(at::Device device) {
  return c10::cuda::CUDACachingAllocator::getDeviceStats(device.index()).allocated_bytes[0].current;
}
/// Gloo, which carries tensors of a GPU by way of the host.
dist::Transport transport_of(int /*rank*/) {
  return dist::gloo("lo");
}
std::vector<std::string> take_waiting_operators(at::Device /*device*/) {
  return {};
}

}  // namespace tessera::test::accelerator
