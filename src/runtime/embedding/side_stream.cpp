#include "runtime/embedding/side_stream.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/types.h>

#include "runtime/torch_bridge.h"

namespace tessera::embedding {
namespace {

constexpr int kNormalPriority = 0;

c10::impl::VirtualGuardImpl guard_of(at::Device device) {
  return c10::impl::VirtualGuardImpl(device.type());
}

}  // namespace

SideStream::SideStream(at::Device device)
    : stream_(guard_of(device).getNewStream(device, kNormalPriority)) {}

c10::Stream SideStream::current() const {
  return guard_of(device()).getStream(device());
}

void SideStream::wait_for_current() const {
  c10::Event event(device().type());
  event.record(current());
  event.block(stream_);
}

c10::Event SideStream::record() const {
  c10::Event event(device().type());
  event.record(stream_);
  return event;
}

void SideStream::let_current_wait(const c10::Event& event) const {
  event.block(current());
}

void SideStream::note_use(const at::Tensor& tensor) const {
  if (!tensor.defined()) return;
  guard_of(device()).recordDataPtrOnStream(tensor.storage().data_ptr(), current());
}

at::Tensor SideStream::to_device(const at::Tensor& on_host) const {
  return tessera::to_device(on_host, device());
}

}  // namespace tessera::embedding
