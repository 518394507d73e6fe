#include "runtime/recompute/autocast_state.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>

namespace tessera {

AutocastState AutocastState::of_this_thread() {
  AutocastState state;
  const auto add = [&](c10::DeviceType type) {
    state.devices_.push_back(
        {type, at::autocast::is_autocast_enabled(type), at::autocast::get_autocast_dtype(type)});
  };
  add(at::kCPU);
  if (const auto accelerator = at::getAccelerator()) add(*accelerator);
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

void AutocastState::disable_cache() {
  at::autocast::set_autocast_cache_enabled(false);
}

}  // namespace tessera
