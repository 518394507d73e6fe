#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "runtime/fsdp/flat_param_contents.h"
#include "runtime/fsdp/flat_param_gather.h"
#include "runtime/fsdp/flat_param_gradients.h"
#include "runtime/fsdp/flat_param_storage.h"
#include "runtime/fsdp/spare_memory.h"
#include "runtime/fsdp/streams.h"
#include "runtime/fsdp/touch_dispatch.h"
#include "runtime/fsdp/whole_parameters.h"
#include "tessera/layout/flat_unit.h"
#include "tessera/runtime/fsdp/unshard_params.h"
#include "tessera/runtime/registry/state_dict.h"

namespace tessera::fsdp {

class FlatParamHandle;

/// Events that a handle reports to the pass of its root module. Called on the thread that runs the
/// operator or the backward.
class HandleEvents {
 public:
  /// Reports that an operator is about to use parameter `index` of the handle.
  virtual void parameter_touched(FlatParamHandle& handle, std::size_t index) = 0;
  /// Reports that a backward is about to accumulate into a parameter's `.grad`.
  virtual void gradient_comes() = 0;
  /// Reports that the backward has put a gradient of parameter `index` into its `.grad`.
  virtual void gradient_ready(FlatParamHandle& handle, std::size_t index) = 0;

 protected:
  virtual ~HandleEvents() = default;
};

/// The flat parameter of a fully sharded module: the module's parameters of one dtype,
/// concatenated.
///
/// Life cycle. A pass is one forward and its backward. Between passes each parameter is this rank's
/// shard of itself: a 1-d view of the flat shard, perhaps empty (of full shape if there is one
/// shard). `enter_pass` gives parameters their full shapes, as views of a flat buffer without
/// memory. `gather` fills the buffer and frees it. `gradients` averages the gradients of the
/// backward; `leave_pass` puts the averages into `.grad`. `show_whole` is for unshard_params. The
/// parameters' TensorImpls do not change, because module and optimizer hold them. Holds its
/// parameters weakly, because they own the handle. Not thread-safe: Pass calls it under a lock.
///
/// This class combines five classes, one per job: FlatParamContents lists the parameters in the
/// flat parameter, FlatParamStorage has the memory, FlatParamGather runs the all-gather,
/// FlatParamGradients averages gradients, WholeParameters is for unshard_params.
class FlatParamHandle final : public std::enable_shared_from_this<FlatParamHandle>,
                              private TouchListener {
 public:
  /// Takes over the parameters: copies this rank's shard of each, and frees the whole tensor.
  /// Requires: the parameters have one dtype and one device, are leaves, and belong to no handle
  /// yet. `unit_name`: of the unit (the fully sharded module), until join_root changes it.
  static std::shared_ptr<FlatParamHandle> create(const std::shared_ptr<torch::nn::Module>& owner,
                                                 const std::string& unit_name,
                                                 const std::vector<ManagedParameter>& parameters,
                                                 std::vector<SharedParameter> shared,
                                                 HandleOptions options);
  ~FlatParamHandle();

  /// Returns the fully sharded module.
  const std::weak_ptr<torch::nn::Module>& owner() const { return owner_; }
  const FlatUnit& unit() const { return contents_.unit(); }
  const std::vector<SharedParameter>& shared_parameters() const {
    return contents_.shared_parameters();
  }
  const HandleOptions& options() const { return contents_.options(); }
  /// Returns the unit's name for messages: `layers.0`, `the root`.
  std::string display_name() const { return contents_.display_name(); }
  /// Sets the owning module's name below its root. Throws: Error(invalid_argument) if the handle
  /// belongs to a live root already, even to this one. `root`: the pass of the root.
  void join_root(std::weak_ptr<const void> root, const std::string& fqn);
  /// Throws: Error(invalid_argument) naming a parameter that is no longer in the module tree.
  void check_tree(const std::unordered_set<const at::TensorImpl*>& in_tree) const;

  /// Returns the parameter, or an undefined tensor if it was destroyed.
  at::Tensor parameter(std::size_t index) const { return contents_.parameter(index); }
  /// Returns the index of a parameter of this handle.
  std::size_t index_of(const at::Tensor& parameter) const { return contents_.index_of(parameter); }
  /// Returns the handle of a parameter; nullptr if the parameter has no handle.
  static std::shared_ptr<FlatParamHandle> of(const at::Tensor& parameter);

  /// Returns whether each rank holds only a shard of the parameters.
  bool is_sharded() const { return contents_.is_sharded(); }
  bool reshards_after_forward() const { return reshards_after_forward_; }
  void set_reshards_after_forward(bool does) { reshards_after_forward_ = does; }

  // Only Pass may change these, under its lock.
  const FlatParamStorage& storage() const { return storage_; }
  FlatParamGather& gather() { return gather_; }
  const FlatParamGather& gather() const { return gather_; }
  FlatParamGradients& gradients() { return gradients_; }
  const FlatParamGradients& gradients() const { return gradients_; }

  // --- passes
  using Tracing = FlatParamStorage::Tracing;
  bool is_in_pass() const { return is_in_pass_; }
  /// Gives parameters full shapes; gathers nothing. `.grad` stays sharded until the backward.
  /// Throws: Error(invalid_argument) within unshard_params, or if one was replaced or moved.
  void enter_pass(const std::shared_ptr<HandleEvents>& events,
                  const std::shared_ptr<const Streams>& streams,
                  const std::shared_ptr<SpareMemory>& memory, Tracing tracing = Tracing::off);
  /// Throws: Error(invalid_argument) naming a parameter if a write in the pass would be lost.
  void check_not_written() const;
  /// Makes parameters and gradients this rank's shards again. Then throws if `check_not_written`
  /// would have thrown before.
  void leave_pass();
  /// As `leave_pass`, but drops the pass's gradients and checks nothing.
  void abort_pass() noexcept;

  // --- whole parameters outside of a pass
  bool is_whole() const { return whole_.are_shown(); }
  /// Shows whole parameters in their own dtype. Calls nest. Collective. Throws:
  /// Error(invalid_argument) within a pass, if an open `show_whole` has other options, or if a
  /// parameter was replaced or moved.
  void show_whole(const UnshardParamsOptions& options);
  /// Shows this rank's shards again. With `writeback`, the shards get what was written to the whole
  /// parameters. Collective if rank 0's writes are sent to all ranks. Throws:
  /// Error(invalid_argument) naming a parameter whose shape was changed; this parameter keeps its
  /// old data.
  void hide_whole() { whole_.hide(); }

  // --- state dicts
  /// Returns this rank's shard of a parameter, which shares the flat parameter's memory, and the
  /// ranks of the other shards. Throws: Error(invalid_argument) within a pass or unshard_params.
  StateTensor state_of(std::size_t index) const;

 private:
  class GradientHook;

  FlatParamHandle(const std::shared_ptr<torch::nn::Module>& owner, const std::string& unit_name,
                  const std::vector<ManagedParameter>& parameters,
                  std::vector<SharedParameter> shared, HandleOptions options);
  void attach_to(const at::Tensor& parameter, std::size_t index);
  void gradient_comes(std::size_t index);
  [[noreturn]] void refuse_write(std::size_t index) const;
  void touched(const at::Tensor& argument) override;

  std::weak_ptr<torch::nn::Module> owner_;
  std::weak_ptr<const void> root_;
  bool reshards_after_forward_;
  bool is_in_pass_ = false;
  std::weak_ptr<HandleEvents> events_;  // during a pass
  // Each member below refers to members before it. Do not reorder them.
  FlatParamContents contents_;
  FlatParamStorage storage_;
  FlatParamGather gather_;
  FlatParamGradients gradients_;
  WholeParameters whole_;
};

}  // namespace tessera::fsdp
