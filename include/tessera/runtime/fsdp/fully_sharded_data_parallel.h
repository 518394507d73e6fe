#pragma once

#include <torch/nn/pimpl.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "tessera/runtime/fsdp/forward.h"
#include "tessera/runtime/fsdp/fully_shard.h"
#include "tessera/runtime/fsdp/policy.h"

namespace tessera {

/// The wrapper way to fully_shard: a holder of a module that it shards at once. It is no module of
/// its own, so names of parameters stay as they are, and what it holds is the same as after
/// `fully_shard(*module, options)`. `Sub` is a module class or its TORCH_MODULE holder.
///
///   struct NetImpl : torch::nn::Module {
///     NetImpl() { block = register_module("block", Sharded(Block(8), options)); }
///     using Sharded = FullyShardedDataParallel<Block>;
///     Sharded block{nullptr};
///   };
///
/// Copies share their module. Source: torch.distributed.fsdp.FullyShardedDataParallel.
template <class Sub>
class FullyShardedDataParallel
    : public torch::nn::ModuleHolder<typename detail::ModuleImpl<Sub>::Type> {
 public:
  /// The module class that is held.
  using Impl = typename detail::ModuleImpl<Sub>::Type;
  /// The plain holder of that class.
  using Holder = torch::nn::ModuleHolder<Impl>;

  FullyShardedDataParallel(std::nullptr_t) : Holder(nullptr) {}
  /// Shards the module. Throws, and is collective, as fully_shard is.
  FullyShardedDataParallel(std::shared_ptr<Impl> module, const FullyShardOptions& options)
      : Holder(std::move(module)) {
    fully_shard(*this->ptr(), options);
  }
  FullyShardedDataParallel(const Holder& module, const FullyShardOptions& options)
      : FullyShardedDataParallel(module.ptr(), options) {}
  /// Holds a module that is sharded already, as `register_module` returns it.
  FullyShardedDataParallel(std::shared_ptr<Impl> module) : Holder(std::move(module)) {}

  /// Calls the module's forward: within a pass that is open as a part of it, else as its root.
  template <class... Args>
  auto operator()(Args&&... args) {
    if (is_in_pass(*this->ptr())) return this->ptr()->forward(std::forward<Args>(args)...);
    return tessera::forward(*this->ptr(), std::forward<Args>(args)...);
  }
};

}  // namespace tessera
