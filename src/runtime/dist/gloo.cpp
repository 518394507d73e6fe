#include <cstdlib>

#include "base/blocked_sigpipe.h"
#include "runtime/dist/gloo_backend.h"
#include "tessera/runtime/dist/mesh.h"

namespace tessera::dist {
namespace {

using c10d::ProcessGroupGloo;

std::shared_ptr<::gloo::transport::Device> device_of(const std::string& interface) {
  if (!interface.empty()) return ProcessGroupGloo::createDeviceForInterface(interface);
  if (const char* name = std::getenv("GLOO_SOCKET_IFNAME"); name != nullptr && *name != '\0') {
    return ProcessGroupGloo::createDeviceForInterface(name);
  }
  return ProcessGroupGloo::createDefaultDevice();
}

}  // namespace

Transport gloo(const std::string& interface) {
  Transport transport;
  transport.name = "Gloo";
  transport.connect = [interface](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                  std::chrono::milliseconds timeout) {
    const BlockedSigpipe block;  // also for the threads of Gloo, which are created here
    auto options = ProcessGroupGloo::Options::create(timeout);
    options->devices.push_back(device_of(interface));
    return c10::make_intrusive<GlooBackend>(store, rank, size, options);
  };
  return transport;
}

}  // namespace tessera::dist
