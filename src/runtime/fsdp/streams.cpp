#include "runtime/fsdp/streams.h"

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera::fsdp {
namespace {

constexpr int kNormalPriority = 0;
constexpr int kHighPriority = -1;  // for streams whose work other streams wait for

c10::impl::VirtualGuardImpl guard_of(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

class DeviceEvent final : public FreeEvent {
 public:
  explicit DeviceEvent(const c10::Stream& stream) : event_(stream.device_type()) {
    event_.record(stream);
  }
  void synchronize() override { event_.synchronize(); }

 private:
  c10::Event event_;
};

}  // namespace

Streams::Streams(at::Device device)
    : default_stream(guard_of(device).getStream(device)),
      unshard(guard_of(device).getNewStream(device, kHighPriority)),
      pre_unshard(guard_of(device).getNewStream(device, kNormalPriority)),
      post_backward(guard_of(device).getNewStream(device, kHighPriority)),
      all_reduce(guard_of(device).getNewStream(device, kNormalPriority)),
      device_(device),
      runs_behind_host_(!device.is_cpu()) {}

c10::Stream Streams::compute() const {
  return guard_of(device_).getStream(device_);
}

void Streams::make_wait(const c10::Stream& waiting, const c10::Stream& awaited) const {
  if (!runs_behind_host_ || waiting == awaited) return;
  c10::Event event(device_.type());
  event.record(awaited);
  event.block(waiting);
}

void Streams::note_use(const at::Tensor& tensor, const c10::Stream& stream) const {
  if (runs_behind_host_) {
    guard_of(device_).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
  }
}

std::unique_ptr<FreeEvent> Streams::record_event() const {
  return std::make_unique<DeviceEvent>(compute());
}

}  // namespace tessera::fsdp
