#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "runtime/fsdp/spare_memory.h"
#include "runtime/fsdp/streams.h"
#include "runtime/fsdp/touch_dispatch.h"
#include "runtime/weak_tensor.h"
#include "tessera/base/error.h"
#include "tessera/layout/flat_unit.h"
#include "tessera/runtime/dist/group.h"
#include "tessera/runtime/fsdp/fully_shard.h"
#include "tessera/runtime/fsdp/unshard_params.h"
#include "tessera/runtime/registry/state_dict.h"

namespace tessera::fsdp {

class FlatParamHandle;

/// What a handle tells its root. All calls come on the thread that runs the operator or the
/// backward.
class HandleEvents {
 public:
  /// An operator uses parameter `index` of the handle.
  virtual void parameter_touched(FlatParamHandle& handle, std::size_t index) = 0;
  /// A backward is about to add a gradient to a parameter's `.grad`.
  virtual void gradient_comes() = 0;
  /// The backward has a gradient of parameter `index` in its `.grad`.
  virtual void gradient_ready(FlatParamHandle& handle, std::size_t index) = 0;

 protected:
  virtual ~HandleEvents() = default;
};

/// A parameter of a handle, with its name below the fully sharded module.
struct ManagedParameter {
  std::string fqn;
  at::Tensor tensor;
};
struct SharedParameter {
  std::string fqn;
  std::size_t index;  // of the parameter that it is
};

struct HandleOptions {
  ShardingStrategy strategy = ShardingStrategy::full_shard;
  MixedPrecision mixed_precision;
  std::shared_ptr<dist::Group> shard_group;
  std::shared_ptr<dist::Group> replicate_group;  // of one rank where nothing is replicated
  std::shared_ptr<dist::Group> world_group;      // of all ranks of the mesh
  FreedParameters freed_parameters = FreedParameters::freed;
  Offload offload = Offload::none;
  /// The mesh's ranks that hold each part, by rank of the shard group.
  std::vector<std::vector<int>> holders{};
};

/// The flat parameter of a fully sharded module: its parameters of one dtype, one after the other.
///
/// Life cycle. Between passes each parameter shows this rank's part of itself, a 1-d view of the
/// flat shard, perhaps empty. `enter_pass` gives them their full shapes, over a flat buffer that
/// has no memory yet; `start_unshard` gives it memory and gathers it; `reshard` takes it back.
/// Gradients are copied out of `.grad` into one flat gradient, summed over the ranks, and handed
/// back by `leave_pass`. The parameters' TensorImpls, which module and optimizer hold, stay.
/// Holds its parameters weakly, as they hold it. Not thread-safe; its root locks.
class FlatParamHandle final : public std::enable_shared_from_this<FlatParamHandle>,
                              private TouchListener {
 public:
  /// Takes the parameters over: copies this rank's part of each, and frees the rest.
  /// Requires: one dtype and one device; every parameter a leaf that nobody manages yet.
  /// `unit_name` is what the unit is called as far as is known by now.
  static std::shared_ptr<FlatParamHandle> create(const std::shared_ptr<torch::nn::Module>& owner,
                                                 const std::string& unit_name,
                                                 std::vector<ManagedParameter> parameters,
                                                 std::vector<SharedParameter> shared,
                                                 HandleOptions options);
  ~FlatParamHandle();

  /// The fully sharded module.
  const std::weak_ptr<torch::nn::Module>& owner() const { return owner_; }
  const FlatUnit& unit() const { return unit_; }
  const std::vector<SharedParameter>& shared_parameters() const { return shared_; }
  const HandleOptions& options() const { return options_; }
  /// Returns the unit's name for messages: `layers.0`, `the root`.
  std::string display_name() const;
  /// Takes the name that the owning module has below its root. Throws: Error(invalid_argument)
  /// where another root that is alive has taken it in.
  void join_root(std::weak_ptr<const void> root, const std::string& fqn);
  /// Throws: Error(invalid_argument) naming a parameter that no module of the tree has any more.
  void check_tree(const std::unordered_set<const at::TensorImpl*>& in_tree) const;

  /// Returns the parameter, or an undefined tensor where it has died.
  at::Tensor parameter(std::size_t index) const { return weak_parameters_[index].lock(); }
  /// Returns the handle of a parameter, or nullptr.
  static std::shared_ptr<FlatParamHandle> of(const at::Tensor& parameter);

  // --- between passes
  /// Whether a pass hears of every use, or only of those that need a gather.
  enum class Tracing { off, on };
  bool is_in_pass() const { return is_in_pass_; }
  const at::Tensor& sharded_flat_param() const { return sharded_flat_param_; }
  /// The device that gathered parameters lie on.
  at::Device compute_device() const { return compute_device_; }
  /// Full shapes from here on; `.grad` stays sharded, up to the backward. Throws:
  /// Error(invalid_argument) naming a parameter that no longer is the runtime's (replaced, moved,
  /// converted).
  void enter_pass(const std::shared_ptr<HandleEvents>& events,
                  const std::shared_ptr<const Streams>& streams,
                  const std::shared_ptr<PassMemory>& memory, Tracing tracing = Tracing::off);
  /// Throws: Error(invalid_argument) naming a parameter that was written to during the pass.
  void check_not_written() const;
  /// Sharded shapes and gradients from here on. Throws as `check_not_written`, when that is done.
  void leave_pass();
  /// As `leave_pass`, but drops what the pass computed and checks nothing.
  void abort_pass() noexcept;

  // --- whole parameters outside of a pass
  bool is_whole() const { return whole_.has_value(); }
  /// Shows whole parameters in their own dtype. They nest. Collective. Throws:
  /// Error(invalid_argument) within a pass, within another such scope with other options, or as
  /// `enter_pass` does.
  void show_whole(const UnshardParamsOptions& options);
  /// Shows this rank's parts again, as they were or as they were written to. Collective where rank
  /// 0's are written back. Throws: Error(invalid_argument) naming a parameter that was given
  /// another shape, which is then as it was.
  void hide_whole();

  // --- state dicts
  /// Returns what this rank holds of a parameter, in the flat parameter's own memory, and who holds
  /// the rest. Throws: Error(invalid_argument) within a pass or unshard_params.
  StateTensor state_of(std::size_t index) const;
  /// Returns the place of a parameter of this handle.
  std::size_t index_of(const at::Tensor& parameter) const;

  // --- within a pass
  enum class Residence { sharded, gathering, unsharded };
  Residence residence() const { return residence_; }
  /// Whether parameters ever leave this rank at all.
  bool is_sharded() const { return options_.shard_group->size() > 1; }
  /// Whether full parameters lie apart from this rank's own: they are sharded, or cast.
  bool has_own_full_buffer() const;
  /// Whether gradients go anywhere: to other ranks, or into another dtype. Else they stay where
  /// autograd puts them.
  bool reduces_gradients() const { return reduces_gradients_; }
  bool reshards_after_forward() const { return reshards_after_forward_; }
  void set_reshards_after_forward(bool does) { reshards_after_forward_ = does; }
  /// What goes before the gather and needs no unsharded memory: the cast.
  void prepare_unshard();
  /// Starts the gather. Collective over the shard group.
  void start_unshard();
  void finish_unshard();
  /// Takes part in a gather for other ranks. This rank's parameters stay as they are. Takes memory
  /// for the whole flat parameter, and gives it back. Collective over the shard group.
  void join_unshard();
  void reshard();

  // --- gradients
  bool has_gradients() const { return num_gradients_ > 0; }
  /// Of earlier passes, under no_sync.
  bool has_unsynced_gradients() const { return unsynced_grad_.defined(); }
  void drop_unsynced_gradients();
  bool has_all_gradients() const { return num_gradients_ == num_trainable_; }
  /// Moves the parameter's `.grad` to the flat gradient. Throws: Error(unsupported) for a sparse
  /// one, or one that has a graph (create_graph).
  void take_gradient(std::size_t index);
  /// Starts to average the flat gradient over the ranks; what has no gradient here counts as zero.
  /// Collective.
  void start_reduce();
  bool is_reducing() const { return unsharded_grad_in_flight_.defined(); }
  /// What operators get from here on finds the averaged gradient. Collective in hybrid strategies.
  void finish_reduce();
  /// Returns for each parameter whether this rank has given, or is about to give, a gradient of it
  /// in this pass.
  std::vector<bool> gave_gradients() const;
  /// Says for which parameters any rank did: what was reduced holds theirs.
  void set_reduced(const std::vector<bool>& any_gave) { was_reduced_ = any_gave; }
  /// Keeps the flat gradient of this pass for the next one (no_sync).
  void keep_unsharded_gradient();

 private:
  class GradientHook;

  FlatParamHandle(FlatUnit unit, std::vector<SharedParameter> shared, HandleOptions options)
      : unit_(std::move(unit)),
        shared_(std::move(shared)),
        options_(std::move(options)),
        reshards_after_forward_(options_.strategy == ShardingStrategy::full_shard ||
                                options_.strategy == ShardingStrategy::hybrid_shard) {}
  void take_over(const std::vector<ManagedParameter>& parameters);
  void put_gradient_aside(std::size_t index);
  std::optional<std::size_t> written_parameter() const;
  [[noreturn]] void refuse_write(std::size_t index) const;
  void touched(const at::Tensor& argument) override;
  /// Throws: Error(invalid_argument) naming a parameter that is no longer the runtime's.
  void check_parameters() const;

  struct Whole {
    UnshardParamsOptions options;
    int depth = 1;
    at::Tensor flat;       // [padded numel], the parameters' own dtype; undefined: not on this rank
    at::Tensor flat_grad;  // the same of gradients, with_grads
    std::vector<bool> has_grad;             // on any rank
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

  std::int64_t num_ranks() const { return options_.shard_group->size(); }
  /// Returns how many ranks' gradients are averaged.
  int num_averaged() const {
    return options_.shard_group->size() * options_.replicate_group->size();
  }
  std::size_t parameter_at(const at::Tensor& view) const;
  at::Tensor sharded_view(const at::Tensor& flat_shard, std::size_t index) const;
  at::Tensor full_view(const at::Tensor& flat, std::size_t index) const;
  /// Zeroes what lies between parameters and after the last.
  void zero_padding(const at::Tensor& flat) const;
  void show(const std::vector<at::Tensor>& views);
  at::Tensor make_unsharded_grad() const;
  void start_all_reduce();
  [[noreturn]] void refuse(ErrorKind kind, std::size_t index, const std::string& expected,
                           const std::string& found, const std::string& likely_cause = {}) const;

  std::weak_ptr<torch::nn::Module> owner_;
  FlatUnit unit_;
  std::vector<SharedParameter> shared_;
  HandleOptions options_;
  std::vector<WeakTensor> weak_parameters_;

  bool reshards_after_forward_;
  bool reduces_gradients_ = true;
  bool is_tracing_ = false;
  std::weak_ptr<const void> root_;
  bool is_in_pass_ = false;
  std::weak_ptr<HandleEvents> events_;      // while in a pass
  std::shared_ptr<const Streams> streams_;  // of the last pass; null before the first
  std::shared_ptr<PassMemory> memory_;      // likewise
  Residence residence_ = Residence::sharded;

  at::Device compute_device_ = at::kCPU;
  at::Tensor sharded_flat_param_;    // [sharded_numel], the parameters' own dtype
  at::Tensor unsharded_flat_param_;  // [padded numel], param_dtype; without memory while sharded
  std::vector<at::Tensor> sharded_views_;  // of sharded_flat_param_
  std::vector<at::Tensor> full_views_;     // of unsharded_flat_param_, with the touch key
  std::optional<TouchRegistration> sharded_registration_;
  std::optional<TouchRegistration> full_registration_;
  at::Tensor cast_shard_;  // alive until the gather is over
  dist::Pending gather_;
  std::vector<std::uint32_t> versions_;  // of the parameters when the pass began

  std::optional<Whole> whole_;

  std::size_t num_trainable_ = 0;
  std::size_t num_gradients_ = 0;
  std::vector<bool> has_gradient_;
  std::vector<bool> was_reduced_;           // in this pass
  std::vector<bool> is_put_aside_;          // in this pass
  std::vector<at::Tensor> kept_gradients_;  // that were: sharded, of earlier passes
  at::Tensor unsharded_grad_;               // [padded numel], filled by take_gradient: predivided
  at::Tensor unsynced_grad_;                // the same of passes under no_sync
  std::vector<bool> has_unsynced_;          // per parameter
  at::Tensor unsharded_grad_in_flight_;
  at::Tensor sharded_grad_in_flight_;
  dist::Pending reduce_;
  bool is_all_reducing_ = false;  // of a gradient that is sharded
  at::Tensor sharded_grad_;       // [sharded_numel], reduced in this pass
};

}  // namespace tessera::fsdp
