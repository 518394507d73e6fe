#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

namespace tessera {

/// The states of the default generators of the CPU and of the devices that tensors are on.
class RngStates {
 public:
  RngStates() = default;  // holds no generator's state
  static RngStates of_devices(const std::vector<at::Tensor>& tensors);

  /// Sets the generators to these states, and returns their previous states.
  RngStates exchange() const;

 private:
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

/// Sets generators to the given states. The destructor restores the previous states.
class RngScope {
 public:
  explicit RngScope(const RngStates& states) : before_(states.exchange()) {}
  ~RngScope() { static_cast<void>(before_.exchange()); }
  RngScope(const RngScope&) = delete;
  RngScope& operator=(const RngScope&) = delete;

 private:
  RngStates before_;
};

}  // namespace tessera
