#include <sys/resource.h>

#include "device.h"
#include "tessera/runtime/dist/launch.h"

namespace tessera::bench {

dist::Mesh connect() {
  return dist::init_from_env();
}

at::Device device() {
  return at::kCPU;
}

void wait_for_device() {}

std::int64_t peak_nbytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

}  // namespace tessera::bench
