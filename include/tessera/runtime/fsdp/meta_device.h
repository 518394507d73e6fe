#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <utility>

namespace tessera {
namespace detail {

/// While it lives, what operators of this thread make is made on the meta device: with shapes and
/// dtypes, without memory.
class [[nodiscard]] MetaDeviceScope {
 public:
  MetaDeviceScope();
  ~MetaDeviceScope();
  MetaDeviceScope(const MetaDeviceScope&) = delete;
  MetaDeviceScope& operator=(const MetaDeviceScope&) = delete;
};

}  // namespace detail

/// Returns what `make` returns, with all of its tensors on the meta device: a model of any size,
/// to be given memory by fully_shard, unit by unit. What `make` computes from values of tensors
/// fails, as on every meta tensor. Source: torch.device("meta") as a context, in Python.
template <class Make>
auto on_meta_device(Make&& make) {
  const detail::MetaDeviceScope scope;
  return std::forward<Make>(make)();
}

}  // namespace tessera
