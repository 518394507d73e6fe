#include "tessera/runtime/fsdp/meta_device.h"

#include "runtime/fsdp/touch_dispatch.h"

namespace tessera::detail {

MetaDeviceScope::MetaDeviceScope() {
  fsdp::enter_meta_device();
}

MetaDeviceScope::~MetaDeviceScope() {
  fsdp::leave_meta_device();
}

}  // namespace tessera::detail
