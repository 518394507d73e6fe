#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
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
#include "tessera/base/error.h"
#include "tessera/layout/flat_unit.h"
#include "tessera/runtime/dist/group.h"
#include "tessera/runtime/fsdp/fully_shard.h"
#include "tessera/runtime/fsdp/unshard_params.h"
#include "tessera/runtime/registry/state_dict.h"

namespace tessera::fsdp {

class FlatParamHandle;

/// What a handle reports to its root, on the thread that runs the operator or the backward.
class HandleEvents {
 public:
  /// An operator is about to use parameter `index` of the handle.
  virtual void parameter_touched(FlatParamHandle& handle, std::size_t index) = 0;
  /// A backward is about to accumulate into a parameter's `.grad`.
  virtual void gradient_comes() = 0;
  /// The backward has put a gradient of parameter `index` into its `.grad`.
  virtual void gradient_ready(FlatParamHandle& handle, std::size_t index) = 0;

 protected:
  virtual ~HandleEvents() = default;
};

/// The flat parameter of a fully sharded module: its parameters of one dtype, concatenated.
///
/// Life cycle. Between passes each parameter is this rank's part of itself: a 1-d view of the flat
/// shard, perhaps empty. `enter_pass` gives parameters their full shapes, as views of a flat buffer
/// without memory. `start_unshard` allocates and all-gathers it; `reshard` frees it. Gradients are
/// copied from `.grad` into one flat gradient, averaged over the ranks, and put back by
/// `leave_pass`. The parameters' TensorImpls do not change: module and optimizer hold them. Holds
/// its parameters weakly, because they own it. Not thread-safe; its root locks.
class FlatParamHandle final : public std::enable_shared_from_this<FlatParamHandle>,
                              private TouchListener {
 public:
  /// Takes over the parameters: copies this rank's part of each, and frees the rest. Requires: one
  /// dtype, one device, and leaf parameters that no handle has. `unit_name` is the unit's name so
  /// far.
  static std::shared_ptr<FlatParamHandle> create(const std::shared_ptr<torch::nn::Module>& owner,
                                                 const std::string& unit_name,
                                                 const std::vector<ManagedParameter>& parameters,
                                                 std::vector<SharedParameter> shared,
                                                 HandleOptions options);
  ~FlatParamHandle();

  /// The fully sharded module.
  const std::weak_ptr<torch::nn::Module>& owner() const { return owner_; }
  const FlatUnit& unit() const { return contents_.unit(); }
  const std::vector<SharedParameter>& shared_parameters() const {
    return contents_.shared_parameters();
  }
  const HandleOptions& options() const { return contents_.options(); }
  /// Returns the unit's name for messages: `layers.0`, `the root`.
  std::string display_name() const { return contents_.display_name(); }
  /// Sets the owning module's name below its root. Throws: Error(invalid_argument) if it belongs to
  /// another live root.
  void join_root(std::weak_ptr<const void> root, const std::string& fqn);
  /// Throws: Error(invalid_argument) naming a parameter that is no longer in the module tree.
  void check_tree(const std::unordered_set<const at::TensorImpl*>& in_tree) const;

  /// Returns the parameter, or an undefined tensor if it is dead.
  at::Tensor parameter(std::size_t index) const { return contents_.parameter(index); }
  /// Returns the index of a parameter of this handle.
  std::size_t index_of(const at::Tensor& parameter) const { return contents_.index_of(parameter); }
  /// Returns the handle of a parameter, or nullptr.
  static std::shared_ptr<FlatParamHandle> of(const at::Tensor& parameter);

  // --- between passes
  using Tracing = FlatParamStorage::Tracing;
  bool is_in_pass() const { return is_in_pass_; }
  /// The memory of the flat parameter.
  const FlatParamStorage& storage() const { return storage_; }
  /// Switches to full shapes. `.grad` stays sharded until the backward. Throws:
  /// Error(invalid_argument) naming a parameter that was replaced, moved or converted.
  void enter_pass(const std::shared_ptr<HandleEvents>& events,
                  const std::shared_ptr<const Streams>& streams,
                  const std::shared_ptr<PassMemory>& memory, Tracing tracing = Tracing::off);
  /// Throws: Error(invalid_argument) naming a parameter that was written to during the pass.
  void check_not_written() const;
  /// Switches to sharded shapes and gradients. Throws as `check_not_written`, but finishes first.
  void leave_pass();
  /// As `leave_pass`, but drops the pass's gradients and checks nothing.
  void abort_pass() noexcept;

  // --- whole parameters outside of a pass
  bool is_whole() const { return whole_.has_value(); }
  /// Shows whole parameters in their own dtype. Calls nest. Collective. Throws:
  /// Error(invalid_argument) within a pass, within another such scope with other options, or as
  /// `enter_pass`.
  void show_whole(const UnshardParamsOptions& options);
  /// Shows this rank's parts again, with the writes to keep. Collective if rank 0's writes are
  /// sent. Throws: Error(invalid_argument) naming a parameter whose shape was changed; its old data
  /// stays.
  void hide_whole();

  // --- state dicts
  /// Returns this rank's part of a parameter, which shares the flat parameter's memory, and the
  /// ranks of the other parts. Throws: Error(invalid_argument) within a pass or unshard_params.
  StateTensor state_of(std::size_t index) const;

  // --- within a pass
  /// Whether a rank holds less than all parameters.
  bool is_sharded() const { return contents_.is_sharded(); }
  bool reshards_after_forward() const { return reshards_after_forward_; }
  void set_reshards_after_forward(bool does) { reshards_after_forward_ = does; }
  /// The all-gather of the parameters.
  FlatParamGather& gather() { return gather_; }
  const FlatParamGather& gather() const { return gather_; }
  /// The gradients of the parameters, and their average over the ranks.
  FlatParamGradients& gradients() { return gradients_; }
  const FlatParamGradients& gradients() const { return gradients_; }

 private:
  class GradientHook;

  FlatParamHandle(const std::shared_ptr<torch::nn::Module>& owner, const std::string& unit_name,
                  const std::vector<ManagedParameter>& parameters,
                  std::vector<SharedParameter> shared, HandleOptions options);
  void attach_to(const at::Tensor& parameter, std::size_t index);
  void gradient_comes(std::size_t index);
  [[noreturn]] void refuse_write(std::size_t index) const;
  void touched(const at::Tensor& argument) override;

  struct Whole {
    UnshardParamsOptions options;
    int depth = 1;
    at::Tensor flat;             // [padded numel], the parameters' own dtype; undefined: not here
    at::Tensor flat_grad;        // the same of gradients, with_grads
    std::vector<bool> has_grad;  // on any rank of the shard group
    std::vector<at::Tensor> sharded_grads;  // put aside
  };
  bool shows_whole() const;
  at::Tensor gather_whole(const at::Tensor& flat_shard) const;
  at::Tensor flat_sharded_grads() const;
  std::vector<bool> have_grads() const;
  std::optional<std::size_t> take_written(const at::Tensor& flat,
                                          const std::vector<at::Tensor>& shown) const;
  void take_from_first(const at::Tensor& flat, at::Tensor part) const;
  void write_back(const at::Tensor& flat, const at::Tensor& part) const;

  std::weak_ptr<torch::nn::Module> owner_;
  FlatParamContents contents_;

  bool reshards_after_forward_;
  std::weak_ptr<const void> root_;
  bool is_in_pass_ = false;
  std::weak_ptr<HandleEvents> events_;  // during a pass

  FlatParamStorage storage_;
  FlatParamGather gather_;
  FlatParamGradients gradients_;

  std::optional<Whole> whole_;
};

}  // namespace tessera::fsdp
