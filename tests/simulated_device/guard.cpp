// Implements c10's device guards, streams and events for the simulated device.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "simulated_device/memory.h"
#include "simulated_device/streams.h"

namespace tessera::sim {
namespace {

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kSim; }

  at::Device exchangeDevice(at::Device device) const override {
    return {kSim, exchange_device(device.index())};
  }
  at::Device getDevice() const override { return {kSim, current_device()}; }
  void setDevice(at::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(at::Device device) const noexcept override {
    exchange_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(streams().by_device.size());
  }

  c10::Stream getStream(at::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(at::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, at::Device(kSim, index_of(device)));
  }
  c10::Stream getNewStream(at::Device device, int /*priority*/) const override {
    return new_stream(index_of(device));
  }
  c10::Stream getStreamFromGlobalPool(at::Device device, bool /*is_urgent*/) const override {
    return new_stream(index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    const Stream& state = state_of(stream);
    const std::lock_guard lock(streams().mutex);
    return state.num_done >= state.num_launched;
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(stream); }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    std::unique_lock lock(streams().mutex);
    const auto of_device = streams().by_device.at(static_cast<std::size_t>(device));
    lock.unlock();
    for (const Stream* const stream : of_device) {
      synchronize_stream(stream_with(device, stream->id));
    }
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new EventState;
    const Stream& state = state_of(stream);
    const std::lock_guard lock(streams().mutex);
    *static_cast<EventState*>(*event) = event_at_end(state);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) make_wait(state_of(stream), *static_cast<EventState*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || is_done(*static_cast<EventState*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait_for(*static_cast<EventState*>(event));
  }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_stream(memory, stream);
  }

 private:
  static c10::DeviceIndex index_of(at::Device device) {
    return device.index() < 0 ? current_device() : device.index();
  }
};

}  // namespace

void register_guard() {
  static const c10::impl::DeviceGuardImplRegistrar registrar(kSim, new Guard);
}

}  // namespace tessera::sim
