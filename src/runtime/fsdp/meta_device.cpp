#include "tessera/runtime/fsdp/fully_shard.h"

#include "runtime/fsdp/touch_dispatch.h"

namespace tessera::detail {

MetaDeviceScope::MetaDeviceScope() {
  fsdp::enter_meta_device();
}

MetaDeviceScope::~MetaDeviceScope() {
  fsdp::leave_meta_device();
}

}  // namespace tessera::detail
