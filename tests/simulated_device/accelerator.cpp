#include "accelerator/accelerator.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>

#include "simulated_device/collectives.h"
#include "simulated_device/support.h"

namespace tessera::test::accelerator {

std::vector<std::string> modes() {
  return {"Lazy", "Eager", "SlowThreads"};
}

void begin(const std::string& mode) {
  restart_under(mode == "Lazy"    ? sim::Schedule::lazy
                : mode == "Eager" ? sim::Schedule::eager
                                  : sim::Schedule::threads);
}

void end() {
  sim::synchronize();
  EXPECT_THAT(sim::take_races(), ::testing::IsEmpty());
}

int num_devices() {
  return at::globalContext().getAcceleratorHooksInterface(sim::device(0).type()).deviceCount();
}
at::Device device(int rank) {
  return sim::device(rank);
}
void set_current(at::Device device) {
  c10::impl::VirtualGuardImpl(device.type()).setDevice(device);
}
void synchronize(at::Device device) {
  c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}
std::int64_t allocated_nbytes(at::Device device) {
  return sim::memory_of(device.index()).now;
}
std::int64_t peak_nbytes(at::Device device) {
  return sim::memory_of(device.index()).peak;
}
void reset_peak(at::Device device) {
  sim::reset_peak(device.index());
}
std::int64_t pinned_nbytes() {
  return sim::pinned_nbytes();
}
std::optional<int> num_processes() {
  return std::nullopt;
}
dist::Mesh connect_processes(const dist::MeshOptions& /*options*/) {
  return {};
}
dist::Transport transport_of(int rank) {
  return sim::transport(sim::device(rank));
}
bool knows_waiting_operators() {
  return true;
}
std::vector<std::string> take_waiting_operators(at::Device device) {
  return device.is_cpu() ? std::vector<std::string>{} : sim::take_waiting_operators(device.index());
}

}  // namespace tessera::test::accelerator
