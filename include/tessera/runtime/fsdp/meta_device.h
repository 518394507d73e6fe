#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <utility>

namespace tessera {
namespace detail {

/// While this lives, operators of this thread create tensors on the meta device: with shapes and
/// dtypes, without memory.
class [[nodiscard]] MetaDeviceScope {
 public:
  MetaDeviceScope();
  ~MetaDeviceScope();
  MetaDeviceScope(const MetaDeviceScope&) = delete;
  MetaDeviceScope& operator=(const MetaDeviceScope&) = delete;
};

}  // namespace detail

/// Calls `make` and returns its result, with all new tensors on the meta device: a model of any
/// size, for fully_shard to allocate unit by unit. `make` must not read tensor values. As `with
/// torch.device("meta")` in Python.
template <class Make>
auto on_meta_device(Make&& make) {
  const detail::MetaDeviceScope scope;
  return std::forward<Make>(make)();
}

}  // namespace tessera
