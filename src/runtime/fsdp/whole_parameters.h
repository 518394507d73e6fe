#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

#include "runtime/fsdp/flat_param_contents.h"
#include "runtime/fsdp/flat_param_storage.h"
#include "tessera/runtime/fsdp/unshard_params.h"

namespace tessera::fsdp {

/// The whole parameters of a handle (FlatParamHandle) outside of any pass, for unshard_params. Owns
/// them and, while they are shown (the module's parameters have their memory), this rank's shards
/// of the gradients. Not thread-safe.
class WholeParameters {
 public:
  /// `contents` and `storage` must outlive this object.
  WholeParameters(const FlatParamContents& contents, FlatParamStorage& storage)
      : contents_(contents), storage_(storage) {}

  bool are_shown() const { return scope_.has_value(); }
  /// Shows whole parameters in their own dtype. Calls nest. Collective over the shard group.
  /// Throws: Error(invalid_argument) if an open `show` has other options, or naming a parameter
  /// that was replaced, moved or converted.
  void show(const UnshardParamsOptions& options);
  /// Ends one `show`. The outermost `hide` shows this rank's shards again; with `writeback`, the
  /// shards get what was written to the whole parameters. Collective if rank 0's writes are sent to
  /// all ranks. Throws: Error(invalid_argument) naming a parameter whose shape was changed; this
  /// parameter keeps its old data.
  void hide();

 private:
  /// The tensors and options of the outermost `show`.
  struct Scope {
    UnshardParamsOptions options;
    int depth = 1;
    at::Tensor flat;       // [padded numel], own dtype; undefined if not shown here
    at::Tensor flat_grad;  // whole gradients; undefined without with_grads
    /// One per parameter: whether any rank of the shard group has a gradient.
    std::vector<bool> has_grad;
    std::vector<at::Tensor> sharded_grads;  // each parameter's `.grad` before `show`
  };
  bool shows_on_this_rank() const;
  void gather();
  at::Tensor gather_whole(const at::Tensor& flat_shard) const;
  at::Tensor flat_sharded_grads() const;
  std::vector<bool> have_grads() const;
  std::vector<bool> have_grads_now(const std::vector<at::Tensor>& shown) const;
  void show_gathered();
  std::optional<std::size_t> write_back_all();

  const FlatParamContents& contents_;
  FlatParamStorage& storage_;
  std::optional<Scope> scope_;
};

}  // namespace tessera::fsdp
