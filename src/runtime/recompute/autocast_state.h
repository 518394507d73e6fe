#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <vector>

namespace tessera {

/// The autocast settings of a thread, for the CPU and the accelerator of this process.
class AutocastState {
 public:
  static AutocastState of_this_thread();
  /// Applies these settings to the current thread.
  void apply() const;
  static void disable_cache();

 private:
  struct OfDevice {
    c10::DeviceType device_type;
    bool is_enabled;
    c10::ScalarType dtype;
  };
  std::vector<OfDevice> devices_;
  bool is_cache_enabled_;
};

/// Applies autocast settings, without autocast's cache of cast weights: nothing would clear it, so
/// a forward after the optimizer's step would use old weights. The destructor restores the
/// settings.
class AutocastScope {
 public:
  explicit AutocastScope(const AutocastState& state) : before_(AutocastState::of_this_thread()) {
    state.apply();
    AutocastState::disable_cache();
  }
  ~AutocastScope() { before_.apply(); }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  AutocastState before_;
};

}  // namespace tessera
