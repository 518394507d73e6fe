#include "runtime/fsdp/flat_param_handle.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/types.h>

#include "runtime/fsdp/traversal.h"
#include "runtime/registry/gradient_hook.h"
#include "runtime/registry/shards.h"
#include "runtime/torch_bridge.h"

namespace tessera::fsdp {
namespace {

using at::Tensor;

/// Returns what to divide by before the sum of an average; the rest is divided after it, so that
/// half precision does not overflow. As in PyTorch's FSDP, for equal roundings.
double predivide_factor(int num_ranks) {
  int factor = 1;
  while (num_ranks % factor == 0 && num_ranks / factor > factor) factor *= 2;
  return factor;
}

}  // namespace

/// The hook of each parameter. Keeps the handle alive.
class FlatParamHandle::GradientHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  GradientHook(std::shared_ptr<FlatParamHandle> handle, std::size_t index)
      : handle_(std::move(handle)), index_(index) {}
  void operator()(const Tensor& /*parameter*/) override {
    const auto events = handle_->events_.lock();
    if (!handle_->is_in_pass_ || !events) {
      handle_->contents_.refuse(ErrorKind::invalid_argument, index_, "a backward within a pass",
                                "one outside of it, whose gradients no other rank would see",
                                "the module's own forward, where tessera::forward was meant?");
    }
    events->gradient_ready(*handle_, index_);
  }
  const std::shared_ptr<FlatParamHandle>& handle() const { return handle_; }

 private:
  std::shared_ptr<FlatParamHandle> handle_;
  std::size_t index_;
};

std::shared_ptr<FlatParamHandle> FlatParamHandle::create(
    const std::shared_ptr<torch::nn::Module>& owner, const std::string& unit_name,
    const std::vector<ManagedParameter>& parameters, std::vector<SharedParameter> shared,
    HandleOptions options) {
  std::shared_ptr<FlatParamHandle> handle(
      new FlatParamHandle(owner, unit_name, parameters, std::move(shared), std::move(options)));
  const at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters.size(); ++i) handle->attach_to(parameters[i].tensor, i);
  handle->storage_.show_shards();
  return handle;
}

FlatParamHandle::FlatParamHandle(const std::shared_ptr<torch::nn::Module>& owner,
                                 const std::string& unit_name,
                                 const std::vector<ManagedParameter>& parameters,
                                 std::vector<SharedParameter> shared, HandleOptions options)
    : owner_(owner),
      contents_(unit_name, parameters, std::move(shared), std::move(options)),
      reshards_after_forward_(this->options().strategy == ShardingStrategy::full_shard ||
                              this->options().strategy == ShardingStrategy::hybrid_shard),
      storage_(contents_, parameters, static_cast<TouchListener&>(*this)),
      gather_(contents_, storage_) {
  reduces_gradients_ = storage_.has_own_full_buffer() || contents_.replicate_group().size() > 1 ||
                       dtype_of(contents_.reduce_dtype()) != unit().dtype;
  has_gradient_.resize(parameters.size());
  was_reduced_.resize(parameters.size());
  kept_gradients_.resize(parameters.size());
  has_unsynced_.resize(parameters.size());
  is_put_aside_.resize(parameters.size());
}

FlatParamHandle::~FlatParamHandle() = default;

std::shared_ptr<FlatParamHandle> FlatParamHandle::of(const Tensor& parameter) {
  const auto* const hook = dynamic_cast<const GradientHook*>(registry::gradient_hook(parameter));
  return hook == nullptr ? nullptr : hook->handle();
}

void FlatParamHandle::join_root(std::weak_ptr<const void> root, const std::string& fqn) {
  if (!root_.expired()) {
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = fqn}, "fully sharded module",
                          "one root", "a second one",
                          "was forward called on both the root and a submodule?");
  }
  root_ = std::move(root);
  contents_.set_unit_name(fqn);
}

void FlatParamHandle::check_tree(const std::unordered_set<const at::TensorImpl*>& in_tree) const {
  for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
    const Tensor shown = contents_.parameter(i);
    if (shown.defined() && in_tree.contains(shown.unsafeGetTensorImpl())) continue;
    contents_.refuse(ErrorKind::invalid_argument, i, "the parameter that fully_shard took over",
                     "none of its modules that has it", "replaced in its module?");
  }
}

/// Registers parameter `index` as part of this handle, and adds the hooks for its gradients.
void FlatParamHandle::attach_to(const Tensor& parameter, std::size_t index) {
  const FlatUnitParameter& in_unit = contents_.unit().parameters[index];
  registry::note_shard(parameter,
                       {{in_unit.fqn, contents_.unit().dtype, in_unit.shape},
                        contents_.is_sharded() ? contents_.options().shard_group : nullptr});
  torch::autograd::impl::set_post_acc_grad_hooks(
      parameter, std::make_unique<GradientHook>(shared_from_this(), index));
  // set_post_acc_grad_hooks keeps only one hook; register_hook lets users add theirs. It needs
  // requires_grad, and a frozen parameter may be trained later.
  const bool is_trained = parameter.requires_grad();
  parameter.set_requires_grad(true);
  parameter.register_hook([handle = shared_from_this(), index](const Tensor& /*gradient*/) {
    handle->put_gradient_aside(index);
  });
  parameter.set_requires_grad(is_trained);
}

StateTensor FlatParamHandle::state_of(std::size_t index) const {
  if (is_in_pass_ || is_whole()) {
    contents_.refuse(ErrorKind::invalid_argument, index,
                     "a state dict outside of passes and of unshard_params",
                     is_in_pass_ ? "one within a pass" : "one within unshard_params",
                     is_in_pass_ ? "a loss whose backward has not run?" : "");
  }
  storage_.check_parameters();
  const FlatUnitParameter& parameter = contents_.unit().parameters[index];
  StateTensor state;
  state.dtype = contents_.unit().dtype;
  state.shape = parameter.shape;
  const auto region_of = [&](int rank) -> Region {
    if (!contents_.is_sharded()) return whole_box(parameter.shape);
    return shard_of_parameter(contents_.unit(), parameter, rank, contents_.shard_group().size());
  };
  for (int rank = 0; rank < contents_.shard_group().size(); ++rank) {
    Region region = region_of(rank);
    if (numel_of(region) == 0) continue;
    state.layout.push_back({region, contents_.options().holders[static_cast<std::size_t>(rank)]});
    if (rank != contents_.shard_group().rank()) continue;
    state.parts.push_back(
        {std::move(region), contents_.sharded_view(storage_.sharded_flat_param(), index)});
  }
  return state;
}

// --- passes

void FlatParamHandle::enter_pass(const std::shared_ptr<HandleEvents>& events,
                                 const std::shared_ptr<const Streams>& streams,
                                 const std::shared_ptr<PassMemory>& memory, Tracing tracing) {
  TESSERA_CHECK(!is_in_pass());
  if (is_whole()) {
    contents_.refuse(ErrorKind::invalid_argument, 0, "a pass outside of unshard_params",
                     "one within it", "call the module's own forward there, without gradients");
  }
  const at::NoGradGuard no_grad;
  storage_.check_parameters();
  storage_.show_full(tracing);
  gather_.enter_pass(streams, memory);
  num_trainable_ = 0;
  for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
    if (contents_.parameter(i).requires_grad()) ++num_trainable_;
    was_reduced_[i] = false;
    is_put_aside_[i] = false;
  }
  events_ = events;
  streams_ = streams;
  memory_ = memory;
  is_in_pass_ = true;
}

void FlatParamHandle::refuse_write(std::size_t index) const {
  contents_.refuse(ErrorKind::invalid_argument, index,
                   "no write between forward and the end of backward", "one, which is lost",
                   "clamping or max_norm inside forward, or a step before backward?");
}

void FlatParamHandle::check_not_written() const {
  if (const auto written = storage_.written_parameter()) refuse_write(*written);
}

void FlatParamHandle::leave_pass() {
  TESSERA_CHECK(is_in_pass() && !is_reducing() && !has_gradients());
  const std::optional<std::size_t> written = storage_.written_parameter();
  const at::NoGradGuard no_grad;
  const UntouchedScope untouched;
  is_in_pass_ = false;
  gather_.reshard();
  storage_.hide_full();
  for (std::size_t i = 0; reduces_gradients_ && i < contents_.num_parameters(); ++i) {
    Tensor shown = contents_.parameter(i);
    if (!shown.defined()) continue;
    Tensor gradient = is_put_aside_[i] ? std::exchange(kept_gradients_[i], Tensor())
                                       : Tensor(shown.mutable_grad());
    if (was_reduced_[i] && sharded_grad_.defined()) {
      const Tensor reduced = contents_.sharded_view(sharded_grad_, i);
      if (gradient.defined()) {
        gradient.add_(reduced);
      } else {
        // A view could not be detached in place by Optimizer::zero_grad. The touch key lets norms
        // of a part throw.
        gradient = torch::empty({0}, reduced.options());
        gradient.set_data(contents_.is_sharded() ? with_touch_key(reduced) : reduced);
      }
    }
    shown.mutable_grad() = std::move(gradient);
  }
  sharded_grad_ = Tensor();
  if (written) refuse_write(*written);
}

void FlatParamHandle::abort_pass() noexcept {
  if (!is_in_pass()) return;
  is_all_reducing_ = false;
  gather_.abort();
  try {
    reduce_.wait();
  } catch (const std::exception&) {
    // The first failure is already being thrown.
  }
  unsharded_grad_ = unsharded_grad_in_flight_ = sharded_grad_in_flight_ = Tensor();
  num_gradients_ = 0;
  has_gradient_.assign(has_gradient_.size(), false);
  was_reduced_.assign(was_reduced_.size(), false);
  storage_.forget_writes();
  leave_pass();
}

void FlatParamHandle::touched(const Tensor& argument) {
  if (storage_.is_in_shard(argument) && storage_.has_own_full_buffer()) {
    if (!at::GradMode::is_enabled() || !argument.requires_grad()) return;  // an optimizer's step
    contents_.refuse(
        ErrorKind::invalid_argument, storage_.parameter_at(argument), "use within a pass",
        "use of this rank's part outside of one",
        "the module's own forward where tessera::forward was meant, or to(); to print this rank's "
        "part take NoGradGuard");
  }
  if (const auto events = events_.lock(); is_in_pass_ && events) {
    return events->parameter_touched(*this, storage_.parameter_at(argument));
  }
  contents_.refuse(ErrorKind::invalid_argument, storage_.parameter_at(argument),
                   "use within a pass",
                   "use after it, by way of a tensor that the pass left behind",
                   "a second backward without tessera::forward, or a view that was kept?");
}

// --- gradients

Tensor FlatParamHandle::make_unsharded_grad() const {
  const auto& precision = contents_.options().mixed_precision;
  const at::ScalarType dtype = precision.reduce_dtype.value_or(
      precision.param_dtype.value_or(storage_.sharded_flat_param().scalar_type()));
  Tensor grad = torch::empty({0}, at::TensorOptions(storage_.compute_device()).dtype(dtype));
  grad.unsafeGetTensorImpl()->set_sizes_contiguous(
      {storage_.sharded_flat_param().numel() * contents_.num_shards()});
  memory_->gradients.allocate(grad);
  return grad;
}

/// Autograd must not add a full gradient to a sharded `.grad`.
void FlatParamHandle::put_gradient_aside(std::size_t index) {
  const auto events = events_.lock();
  if (!is_in_pass_ || !events) return;  // GradientHook refuses it
  events->gradient_comes();
  if (!reduces_gradients_ || is_put_aside_[index]) return;
  is_put_aside_[index] = true;
  kept_gradients_[index] = std::exchange(contents_.parameter(index).mutable_grad(), Tensor());
}

void FlatParamHandle::take_gradient(std::size_t index) {
  Tensor parameter = this->parameter(index);
  const Tensor gradient = std::exchange(parameter.mutable_grad(), Tensor());
  TESSERA_CHECK(gradient.defined());
  if (gradient.layout() != at::kStrided) {
    contents_.refuse(ErrorKind::unsupported, index, "a dense gradient", "a sparse one",
                     "an embedding made with sparse(true)?");
  }
  if (gradient.requires_grad()) {
    contents_.refuse(ErrorKind::unsupported, index, "a gradient without a graph",
                     "one with a graph", "create_graph: not possible for sharded parameters");
  }
  const at::NoGradGuard no_grad;
  if (!unsharded_grad_.defined()) unsharded_grad_ = make_unsharded_grad();
  Tensor slot = contents_.full_view(unsharded_grad_, index);
  const Tensor share = at::scalar_tensor(1 / predivide_factor(contents_.num_averaged()));  // exact
  if (has_gradient_[index]) {
    slot.add_(gradient.to(slot.scalar_type()).mul(share));
    return;
  }
  if (gradient.scalar_type() == slot.scalar_type()) {
    at::mul_out(slot, gradient, share);
  } else {
    slot.copy_(gradient).mul_(share);
  }
  has_gradient_[index] = true;
  ++num_gradients_;
}

void FlatParamHandle::drop_unsynced_gradients() {
  unsynced_grad_ = Tensor();
  has_unsynced_.assign(has_unsynced_.size(), false);
}

void FlatParamHandle::start_reduce() {
  TESSERA_CHECK(!is_reducing());
  const at::NoGradGuard no_grad;
  if (!unsharded_grad_.defined()) unsharded_grad_ = make_unsharded_grad();
  for (std::size_t i = 0; i < has_gradient_.size(); ++i) {
    Tensor slot = contents_.full_view(unsharded_grad_, i);
    const bool is_unsynced = has_unsynced_[i];
    if (has_gradient_[i] && is_unsynced) {
      slot.add_(contents_.full_view(unsynced_grad_, i));
    } else if (is_unsynced) {
      slot.copy_(contents_.full_view(unsynced_grad_, i));
    } else if (!has_gradient_[i]) {
      slot.zero_();
    }
    was_reduced_[i] = was_reduced_[i] || has_gradient_[i] || is_unsynced;
  }
  contents_.zero_padding(unsharded_grad_);
  drop_unsynced_gradients();
  has_gradient_.assign(has_gradient_.size(), false);
  num_gradients_ = 0;

  streams_->make_wait(streams_->post_backward, streams_->compute());
  const c10::StreamGuard on(streams_->post_backward);
  unsharded_grad_in_flight_ = std::exchange(unsharded_grad_, Tensor());
  if (contents_.is_sharded()) {
    sharded_grad_in_flight_ =
        torch::empty({storage_.sharded_flat_param().numel()}, unsharded_grad_in_flight_.options());
    reduce_ = contents_.shard_group().reduce_scatter(
        sharded_grad_in_flight_, unsharded_grad_in_flight_, contents_.display_name());
    if (streams_->run_behind_host()) start_all_reduce();
  } else {
    sharded_grad_in_flight_ = unsharded_grad_in_flight_;
    reduce_ =
        contents_.replicate_group().all_reduce(sharded_grad_in_flight_, contents_.display_name());
  }
}

/// Starts the second half of a hybrid strategy's average, after the first.
void FlatParamHandle::start_all_reduce() {
  if (contents_.replicate_group().size() == 1 || std::exchange(is_all_reducing_, true)) return;
  reduce_.wait();
  streams_->make_wait(streams_->all_reduce, streams_->post_backward);
  const c10::StreamGuard on(streams_->all_reduce);
  reduce_ =
      contents_.replicate_group().all_reduce(sharded_grad_in_flight_, contents_.display_name());
}

void FlatParamHandle::finish_reduce() {
  if (!is_reducing()) return;
  const at::NoGradGuard no_grad;
  {
    const c10::StreamGuard on(streams_->post_backward);
    if (contents_.is_sharded()) start_all_reduce();
    reduce_.wait();
    if (const double factor = contents_.num_averaged() / predivide_factor(contents_.num_averaged());
        factor > 1) {
      sharded_grad_in_flight_.div_(factor);
    }
    Tensor reduced = sharded_grad_in_flight_;
    if (contents_.options().mixed_precision.gradients == MixedPrecision::Gradients::master_dtype) {
      reduced = reduced.to(storage_.sharded_flat_param().scalar_type());
    }
    reduced = reduced.to(storage_.sharded_flat_param().device());
    if (sharded_grad_.defined()) {
      sharded_grad_.add_(reduced);
    } else {
      sharded_grad_ = std::move(reduced);
    }
  }
  // Their memory belongs to the compute stream, which must wait before it is freed.
  streams_->make_wait(streams_->compute(), streams_->post_backward);
  sharded_grad_in_flight_ = Tensor();
  if (contents_.is_sharded()) memory_->gradients.free(unsharded_grad_in_flight_);
  unsharded_grad_in_flight_ = Tensor();
  is_all_reducing_ = false;
}

std::vector<bool> FlatParamHandle::gave_gradients() const {
  std::vector<bool> gave = was_reduced_;
  for (std::size_t i = 0; i < gave.size(); ++i) {
    gave[i] = gave[i] || has_gradient_[i] || has_unsynced_[i];
  }
  return gave;
}

void FlatParamHandle::keep_unsharded_gradient() {
  if (!has_gradients()) return;
  const at::NoGradGuard no_grad;
  if (!unsynced_grad_.defined()) {
    unsynced_grad_ = std::exchange(unsharded_grad_, Tensor());
    has_unsynced_ = has_gradient_;
  } else {
    for (std::size_t i = 0; i < has_gradient_.size(); ++i) {
      if (!has_gradient_[i]) continue;
      Tensor slot = contents_.full_view(unsynced_grad_, i);
      has_unsynced_[i] ? slot.add_(contents_.full_view(unsharded_grad_, i))
                       : slot.copy_(contents_.full_view(unsharded_grad_, i));
      has_unsynced_[i] = true;
    }
    unsharded_grad_ = Tensor();
  }
  has_gradient_.assign(has_gradient_.size(), false);
  num_gradients_ = 0;
}

}  // namespace tessera::fsdp
