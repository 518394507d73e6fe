#include "runtime/recompute/autocast_state.h"

#include <ATen/autocast_mode.h>

namespace tessera {

AutocastState AutocastState::of_this_thread() {
  AutocastState state;
  const auto of_device = [](c10::DeviceType type) {
    return OfDevice{type, at::autocast::is_autocast_enabled(type),
                    at::autocast::get_autocast_dtype(type)};
  };
  state.devices_ = {of_device(at::kCPU), of_device(at::kCUDA)};
  state.is_cache_enabled_ = at::autocast::is_autocast_cache_enabled();
  return state;
}

void AutocastState::apply() const {
  for (const OfDevice& each : devices_) {
    at::autocast::set_autocast_enabled(each.device_type, each.is_enabled);
    at::autocast::set_autocast_dtype(each.device_type, each.dtype);
  }
  at::autocast::set_autocast_cache_enabled(is_cache_enabled_);
}

}  // namespace tessera
