#pragma once

#include <torch/nn/pimpl.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "tessera/runtime/fsdp/forward.h"
#include "tessera/runtime/fsdp/fully_shard.h"
#include "tessera/runtime/fsdp/policy.h"

namespace tessera {

/// A module holder that calls fully_shard on its module when the holder is constructed. The holder
/// is not a module itself, so parameter names do not change. The module is the same as after
/// `fully_shard(*module, options)`. `Sub` is a module class or its TORCH_MODULE holder.
///
///   struct NetImpl : torch::nn::Module {
///     NetImpl() { block = register_module("block", Sharded(Block(8), options)); }
///     using Sharded = FullyShardedDataParallel<Block>;
///     Sharded block{nullptr};
///   };
///
/// Copies of the holder share the module. Source: torch.distributed.fsdp.FullyShardedDataParallel.
template <class Sub>
class FullyShardedDataParallel
    : public torch::nn::ModuleHolder<typename detail::ModuleImpl<Sub>::Type> {
 public:
  /// The class of the module.
  using Impl = typename detail::ModuleImpl<Sub>::Type;
  /// The plain holder of that class.
  using Holder = torch::nn::ModuleHolder<Impl>;

  FullyShardedDataParallel(std::nullptr_t) : Holder(nullptr) {}
  /// Shards the module. Throws as fully_shard; collective as fully_shard.
  FullyShardedDataParallel(std::shared_ptr<Impl> module, const FullyShardOptions& options)
      : Holder(std::move(module)) {
    fully_shard(*this->ptr(), options);
  }
  FullyShardedDataParallel(const Holder& module, const FullyShardOptions& options)
      : FullyShardedDataParallel(module.ptr(), options) {}
  /// Holds a module that is sharded already, such as one that `register_module` returned.
  FullyShardedDataParallel(std::shared_ptr<Impl> module) : Holder(std::move(module)) {}

  /// Calls the module's forward. If the module is in an open pass, the call is part of that pass.
  /// Otherwise the call opens a new pass, whose root is the module (`tessera::forward`).
  template <class... Args>
  auto operator()(Args&&... args) {
    if (is_in_pass(*this->ptr())) return this->ptr()->forward(std::forward<Args>(args)...);
    return tessera::forward(*this->ptr(), std::forward<Args>(args)...);
  }
};

}  // namespace tessera
