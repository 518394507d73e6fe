#include "runtime/fsdp/flat_param_handle.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/types.h>

#include <algorithm>
#include <limits>

#include "runtime/fsdp/traversal.h"
#include "runtime/registry/gradient_hook.h"
#include "runtime/registry/parameter_shards.h"
#include "runtime/torch_bridge.h"

namespace tessera::fsdp {
namespace {

using at::Tensor;

bool has_memory(const Tensor& tensor) {
  return tensor.storage().nbytes() > 0;
}

/// Alignment for vectorised kernels, as in PyTorch's FSDP with use_orig_params.
constexpr std::int64_t kAlignmentNbytes = 16;

/// Moves parameters so that each offset is a multiple of `numel` elements.
void align(FlatUnit& unit, std::int64_t numel) {
  std::int64_t end = 0;
  for (FlatUnitParameter& parameter : unit.parameters) {
    parameter.offset = (end + numel - 1) / numel * numel;
    end = parameter.offset + numel_of(parameter.shape);
  }
}

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
      handle_->refuse(ErrorKind::invalid_argument, index_, "a backward within a pass",
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
    std::vector<ManagedParameter> parameters, std::vector<SharedParameter> shared,
    HandleOptions options) {
  std::vector<std::pair<std::string, Shape>> shapes;
  for (const ManagedParameter& parameter : parameters) {
    shapes.emplace_back(parameter.fqn,
                        Shape(parameter.tensor.sizes().begin(), parameter.tensor.sizes().end()));
  }
  FlatUnit unit = make_flat_unit(unit_name, dtype_of(parameters.front().tensor.scalar_type()),
                                 std::move(shapes));
  const at::ScalarType compute_dtype =
      options.mixed_precision.param_dtype.value_or(parameters.front().tensor.scalar_type());
  align(unit, kAlignmentNbytes / static_cast<std::int64_t>(c10::elementSize(compute_dtype)));
  std::shared_ptr<FlatParamHandle> handle(
      new FlatParamHandle(std::move(unit), std::move(shared), std::move(options)));
  handle->owner_ = owner;
  handle->take_over(parameters);
  return handle;
}

FlatParamHandle::~FlatParamHandle() = default;

std::shared_ptr<FlatParamHandle> FlatParamHandle::of(const Tensor& parameter) {
  const auto* const hook = dynamic_cast<const GradientHook*>(registry::gradient_hook(parameter));
  return hook == nullptr ? nullptr : hook->handle();
}

std::string FlatParamHandle::display_name() const {
  return unit_.name.empty() ? "the root" : unit_.name;
}

void FlatParamHandle::join_root(std::weak_ptr<const void> root, const std::string& fqn) {
  if (!root_.expired()) {
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = fqn}, "fully sharded module",
                          "one root", "a second one",
                          "was forward called on both the root and a submodule?");
  }
  root_ = std::move(root);
  unit_.name = fqn;
}

void FlatParamHandle::check_tree(const std::unordered_set<const at::TensorImpl*>& in_tree) const {
  for (std::size_t i = 0; i < weak_parameters_.size(); ++i) {
    const Tensor shown = parameter(i);
    if (shown.defined() && in_tree.contains(shown.unsafeGetTensorImpl())) continue;
    refuse(ErrorKind::invalid_argument, i, "the parameter that fully_shard took over",
           "none of its modules that has it", "replaced in its module?");
  }
}

void FlatParamHandle::refuse(ErrorKind kind, std::size_t index, const std::string& expected,
                             const std::string& found, const std::string& likely_cause) const {
  const std::string& fqn = unit_.parameters[index].fqn;
  throw Error::expected(kind, {.fqn = join_fqn(unit_.name, fqn)},
                        "parameter of a fully sharded module", expected, found, likely_cause);
}

void FlatParamHandle::take_over(const std::vector<ManagedParameter>& parameters) {
  const at::NoGradGuard no_grad;
  copy_own_shard(parameters);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    sharded_views_.push_back(sharded_view(sharded_flat_param_, i));
  }
  if (has_own_full_buffer()) make_full_buffer(parameters.front().tensor.options());

  const auto& reduce_dtype = options_.mixed_precision.reduce_dtype;
  reduces_gradients_ = has_own_full_buffer() || options_.replicate_group->size() > 1 ||
                       (reduce_dtype && dtype_of(*reduce_dtype) != unit_.dtype);
  has_gradient_.resize(parameters.size());
  was_reduced_.resize(parameters.size());
  kept_gradients_.resize(parameters.size());
  has_unsynced_.resize(parameters.size());
  is_put_aside_.resize(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) attach_to(parameters[i].tensor, i);
  show(sharded_views_);
}

/// Concatenates the parameters, and keeps this rank's shard.
void FlatParamHandle::copy_own_shard(const std::vector<ManagedParameter>& parameters) {
  const Tensor& first = parameters.front().tensor;
  const std::int64_t shard_numel = sharded_numel(unit_, options_.shard_group->size());
  Tensor flat = torch::empty({shard_numel * num_ranks()}, first.options().requires_grad(false));
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    full_view(flat, i).copy_(parameters[i].tensor);
  }
  zero_padding(flat);
  sharded_flat_param_ =
      is_sharded() ? flat.narrow(0, options_.shard_group->rank() * shard_numel, shard_numel).clone()
                   : flat;
  compute_device_ = first.device();
  if (options_.offload == Offload::params) {
    sharded_flat_param_ = sharded_flat_param_.to(at::kCPU);
    if (compute_device_.is_cuda()) sharded_flat_param_ = sharded_flat_param_.pin_memory();
  }
}

/// Makes the buffer of gathered parameters, with views of it for each parameter, and frees the
/// buffer's memory. `own`: the options of the parameters.
void FlatParamHandle::make_full_buffer(const at::TensorOptions& own) {
  for (Tensor& view : sharded_views_) view = with_touch_key(view);
  sharded_registration_.emplace(sharded_flat_param_.storage(), static_cast<TouchListener&>(*this));
  const at::ScalarType own_dtype = c10::typeMetaToScalarType(own.dtype());
  unsharded_flat_param_ = torch::empty(
      {sharded_flat_param_.numel() * num_ranks()},
      own.requires_grad(false).dtype(options_.mixed_precision.param_dtype.value_or(own_dtype)));
  // Created while the buffer has memory: narrow would fail afterwards.
  for (std::size_t i = 0; i < sharded_views_.size(); ++i) {
    full_views_.push_back(with_touch_key(full_view(unsharded_flat_param_, i)));
  }
  full_registration_.emplace(unsharded_flat_param_.storage(), static_cast<TouchListener&>(*this));
  SpareMemory().free(unsharded_flat_param_);
}

/// Registers parameter `index` as part of this handle, and adds the hooks for its gradients.
void FlatParamHandle::attach_to(const Tensor& parameter, std::size_t index) {
  const FlatUnitParameter& in_unit = unit_.parameters[index];
  weak_parameters_.emplace_back(parameter);
  registry::note_shard(parameter, {{in_unit.fqn, unit_.dtype, in_unit.shape},
                                   is_sharded() ? options_.shard_group : nullptr});
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

void FlatParamHandle::zero_padding(const Tensor& flat) const {
  std::int64_t end = 0;
  const auto zero = [&](std::int64_t next) {
    if (next > end) flat.narrow(0, end, next - end).zero_();
  };
  for (const FlatUnitParameter& parameter : unit_.parameters) {
    zero(parameter.offset);
    end = parameter.offset + numel_of(parameter.shape);
  }
  zero(flat.numel());
}

bool FlatParamHandle::has_own_full_buffer() const {
  const auto& param_dtype = options_.mixed_precision.param_dtype;
  return is_sharded() || (param_dtype && dtype_of(*param_dtype) != unit_.dtype) ||
         sharded_flat_param_.device() != compute_device_;
}

Tensor FlatParamHandle::full_view(const Tensor& flat, std::size_t index) const {
  const FlatUnitParameter& parameter = unit_.parameters[index];
  return flat.narrow(0, parameter.offset, numel_of(parameter.shape)).view(parameter.shape);
}

/// In a group of one rank the shard is the whole parameter and keeps its shape.
Tensor FlatParamHandle::sharded_view(const Tensor& flat_shard, std::size_t index) const {
  if (!is_sharded()) return full_view(flat_shard, index);
  const FlatUnitParameter& parameter = unit_.parameters[index];
  const int rank = options_.shard_group->rank();
  const FlatRange range = shard_of_parameter(unit_, parameter, rank, options_.shard_group->size());
  if (range.numel() == 0) return flat_shard.narrow(0, 0, 0);
  return flat_shard.narrow(0, parameter.offset + range.begin - rank * flat_shard.numel(),
                           range.numel());
}

void FlatParamHandle::show(const std::vector<Tensor>& views) {
  for (std::size_t i = 0; i < weak_parameters_.size(); ++i) {
    if (Tensor shown = parameter(i); shown.defined()) shown.set_data(views[i]);
  }
}

/// A view begins within its parameter. The view of an empty one begins where the next one does.
std::size_t FlatParamHandle::parameter_at(const Tensor& view) const {
  std::int64_t position = view.storage_offset();
  if (is_sharded() && view.storage().is_alias_of(sharded_flat_param_.storage())) {
    position += options_.shard_group->rank() * sharded_flat_param_.numel();
  }
  const auto after =
      std::ranges::upper_bound(unit_.parameters, position, {}, &FlatUnitParameter::offset);
  return static_cast<std::size_t>(after - unit_.parameters.begin()) - 1;
}

void FlatParamHandle::check_parameters() const {
  for (std::size_t i = 0; i < weak_parameters_.size(); ++i) {
    const Tensor shown = parameter(i);
    if (!shown.defined()) {
      refuse(ErrorKind::invalid_argument, i, "the parameter that fully_shard took over",
             "none that is alive", "replaced in its module?");
    }
    if (!shown.storage().is_alias_of(sharded_flat_param_.storage())) {
      refuse(ErrorKind::invalid_argument, i, "a view of the flat parameter", "other memory",
             "module->to(), set_data or a loaded module after fully_shard?");
    }
  }
}

std::size_t FlatParamHandle::index_of(const Tensor& parameter) const {
  for (std::size_t i = 0; i < weak_parameters_.size(); ++i) {
    if (this->parameter(i).is_same(parameter)) return i;
  }
  TESSERA_CHECK(false);
}

StateTensor FlatParamHandle::state_of(std::size_t index) const {
  if (is_in_pass_ || is_whole()) {
    refuse(ErrorKind::invalid_argument, index,
           "a state dict outside of passes and of unshard_params",
           is_in_pass_ ? "one within a pass" : "one within unshard_params",
           is_in_pass_ ? "a loss whose backward has not run?" : "");
  }
  check_parameters();
  const FlatUnitParameter& parameter = unit_.parameters[index];
  StateTensor state;
  state.dtype = unit_.dtype;
  state.shape = parameter.shape;
  const auto region_of = [&](int rank) -> Region {
    if (!is_sharded()) return whole_box(parameter.shape);
    return shard_of_parameter(unit_, parameter, rank, options_.shard_group->size());
  };
  for (int rank = 0; rank < options_.shard_group->size(); ++rank) {
    Region region = region_of(rank);
    if (numel_of(region) == 0) continue;
    state.layout.push_back({region, options_.holders[static_cast<std::size_t>(rank)]});
    if (rank != options_.shard_group->rank()) continue;
    state.local_shards.push_back({std::move(region), sharded_view(sharded_flat_param_, index)});
  }
  return state;
}

// --- passes

void FlatParamHandle::enter_pass(const std::shared_ptr<HandleEvents>& events,
                                 const std::shared_ptr<const Streams>& streams,
                                 const std::shared_ptr<PassMemory>& memory, Tracing tracing) {
  TESSERA_CHECK(!is_in_pass());
  if (is_whole()) {
    refuse(ErrorKind::invalid_argument, 0, "a pass outside of unshard_params", "one within it",
           "call the module's own forward there, without gradients");
  }
  const at::NoGradGuard no_grad;
  check_parameters();
  versions_.clear();
  num_trainable_ = 0;
  for (std::size_t i = 0; i < weak_parameters_.size(); ++i) {
    Tensor shown = parameter(i);
    if (shown.requires_grad()) ++num_trainable_;
    if (!full_views_.empty()) {
      shown.set_data(full_views_[i]);
    } else if (tracing == Tracing::on) {
      shown.set_data(with_touch_key(sharded_views_[i]));
    }
    versions_.push_back(static_cast<std::uint32_t>(shown._version()));
    was_reduced_[i] = false;
    is_put_aside_[i] = false;
  }
  if (full_views_.empty() && tracing == Tracing::on) {
    full_registration_.emplace(sharded_flat_param_.storage(), static_cast<TouchListener&>(*this));
  }
  is_tracing_ = tracing == Tracing::on;
  events_ = events;
  streams_ = streams;
  memory_ = memory;
  is_in_pass_ = true;
}

std::optional<std::size_t> FlatParamHandle::written_parameter() const {
  if (full_views_.empty()) return std::nullopt;  // the parameters are the shards: writes are kept
  for (std::size_t i = weak_parameters_.size(); i-- > 0;) {
    const Tensor shown = parameter(i);
    if (!shown.defined()) continue;
    if (static_cast<std::uint32_t>(shown._version()) != versions_[i]) return i;
  }
  return std::nullopt;
}

void FlatParamHandle::refuse_write(std::size_t index) const {
  refuse(ErrorKind::invalid_argument, index, "no write between forward and the end of backward",
         "one, which is lost", "clamping or max_norm inside forward, or a step before backward?");
}

void FlatParamHandle::check_not_written() const {
  if (const auto written = written_parameter()) refuse_write(*written);
}

void FlatParamHandle::leave_pass() {
  TESSERA_CHECK(is_in_pass() && !is_reducing() && !has_gradients());
  const std::optional<std::size_t> written = written_parameter();
  const at::NoGradGuard no_grad;
  const UntouchedScope untouched;
  is_in_pass_ = false;
  reshard();
  if (full_views_.empty()) full_registration_.reset();  // of tracing
  if (!full_views_.empty() || is_tracing_) show(sharded_views_);
  for (std::size_t i = 0; reduces_gradients_ && i < weak_parameters_.size(); ++i) {
    Tensor shown = parameter(i);
    if (!shown.defined()) continue;
    Tensor gradient = is_put_aside_[i] ? std::exchange(kept_gradients_[i], Tensor())
                                       : Tensor(shown.mutable_grad());
    if (was_reduced_[i] && sharded_grad_.defined()) {
      const Tensor reduced = sharded_view(sharded_grad_, i);
      if (gradient.defined()) {
        gradient.add_(reduced);
      } else {
        // A view could not be detached in place by Optimizer::zero_grad. The touch key lets norms
        // of a part throw.
        gradient = torch::empty({0}, reduced.options());
        gradient.set_data(is_sharded() ? with_touch_key(reduced) : reduced);
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
  for (dist::Pending* pending : {&gather_, &reduce_}) {
    try {
      pending->wait();
    } catch (const std::exception&) {
      // The first failure is already being thrown.
    }
  }
  if (residence_ == Residence::gathering) residence_ = Residence::unsharded;
  cast_shard_ = unsharded_grad_ = unsharded_grad_in_flight_ = sharded_grad_in_flight_ = Tensor();
  num_gradients_ = 0;
  has_gradient_.assign(has_gradient_.size(), false);
  was_reduced_.assign(was_reduced_.size(), false);
  for (std::size_t i = 0; i < weak_parameters_.size(); ++i) {
    if (const Tensor shown = parameter(i); shown.defined()) {
      versions_[i] = static_cast<std::uint32_t>(shown._version());
    }
  }
  leave_pass();
}

void FlatParamHandle::touched(const Tensor& argument) {
  if (argument.storage().is_alias_of(sharded_flat_param_.storage()) && !full_views_.empty()) {
    if (!at::GradMode::is_enabled() || !argument.requires_grad()) return;  // an optimizer's step
    refuse(
        ErrorKind::invalid_argument, parameter_at(argument), "use within a pass",
        "use of this rank's part outside of one",
        "the module's own forward where tessera::forward was meant, or to(); to print this rank's "
        "part take NoGradGuard");
  }
  if (const auto events = events_.lock(); is_in_pass_ && events) {
    return events->parameter_touched(*this, parameter_at(argument));
  }
  refuse(ErrorKind::invalid_argument, parameter_at(argument), "use within a pass",
         "use after it, by way of a tensor that the pass left behind",
         "a second backward without tessera::forward, or a view that was kept?");
}

void FlatParamHandle::prepare_unshard() {
  if (residence_ != Residence::sharded || full_views_.empty()) return;
  const at::NoGradGuard no_grad;
  const c10::StreamGuard on(streams_->pre_unshard);
  cast_shard_ = sharded_flat_param_.to(compute_device_, unsharded_flat_param_.scalar_type(),
                                       /*non_blocking=*/true);
}

void FlatParamHandle::start_unshard() {
  if (residence_ != Residence::sharded || full_views_.empty()) return;
  const at::NoGradGuard no_grad;
  streams_->make_wait(streams_->unshard, streams_->pre_unshard);
  const c10::StreamGuard on(streams_->unshard);
  if (!has_memory(unsharded_flat_param_)) memory_->parameters.allocate(unsharded_flat_param_);
  residence_ = Residence::gathering;
  gather_ = options_.shard_group->all_gather(unsharded_flat_param_, cast_shard_, display_name());
}

void FlatParamHandle::finish_unshard() {
  if (residence_ != Residence::gathering) return;
  residence_ = Residence::unsharded;
  {
    const c10::StreamGuard on(streams_->unshard);
    gather_.wait();
  }
  streams_->make_wait(streams_->compute(), streams_->unshard);
  streams_->note_use(cast_shard_, streams_->unshard);
  cast_shard_ = Tensor();
}

void FlatParamHandle::join_unshard() {
  if (!is_sharded()) return;
  const at::NoGradGuard no_grad;
  Tensor part;
  {
    const c10::StreamGuard on(streams_->pre_unshard);
    part = sharded_flat_param_.to(compute_device_, unsharded_flat_param_.scalar_type(),
                                  /*non_blocking=*/true);
  }
  streams_->make_wait(streams_->unshard, streams_->pre_unshard);
  const c10::StreamGuard on(streams_->unshard);
  const Tensor whole =
      torch::empty({sharded_flat_param_.numel() * num_ranks()}, unsharded_flat_param_.options());
  options_.shard_group->all_gather(whole, part, display_name()).wait();
  streams_->note_use(part, streams_->unshard);
}

void FlatParamHandle::reshard() {
  finish_unshard();
  if (residence_ != Residence::unsharded) return;
  if (options_.freed_parameters == FreedParameters::poisoned) {
    const at::NoGradGuard no_grad;
    unsharded_flat_param_.fill_(std::numeric_limits<double>::quiet_NaN());
    streams_->make_wait(streams_->unshard, streams_->compute());
  } else {
    streams_->note_use(unsharded_flat_param_, streams_->compute());
    memory_->parameters.free(unsharded_flat_param_);
  }
  residence_ = Residence::sharded;
}

// --- gradients

Tensor FlatParamHandle::make_unsharded_grad() const {
  const auto& precision = options_.mixed_precision;
  const at::ScalarType dtype = precision.reduce_dtype.value_or(
      precision.param_dtype.value_or(sharded_flat_param_.scalar_type()));
  Tensor grad = torch::empty({0}, at::TensorOptions(compute_device_).dtype(dtype));
  grad.unsafeGetTensorImpl()->set_sizes_contiguous({sharded_flat_param_.numel() * num_ranks()});
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
  kept_gradients_[index] = std::exchange(parameter(index).mutable_grad(), Tensor());
}

void FlatParamHandle::take_gradient(std::size_t index) {
  Tensor parameter = this->parameter(index);
  const Tensor gradient = std::exchange(parameter.mutable_grad(), Tensor());
  TESSERA_CHECK(gradient.defined());
  if (gradient.layout() != at::kStrided) {
    refuse(ErrorKind::unsupported, index, "a dense gradient", "a sparse one",
           "an embedding made with sparse(true)?");
  }
  if (gradient.requires_grad()) {
    refuse(ErrorKind::unsupported, index, "a gradient without a graph", "one with a graph",
           "create_graph: not possible for sharded parameters");
  }
  const at::NoGradGuard no_grad;
  if (!unsharded_grad_.defined()) unsharded_grad_ = make_unsharded_grad();
  Tensor slot = full_view(unsharded_grad_, index);
  const Tensor share = at::scalar_tensor(1 / predivide_factor(num_averaged()));  // exact
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
    Tensor slot = full_view(unsharded_grad_, i);
    const bool is_unsynced = has_unsynced_[i];
    if (has_gradient_[i] && is_unsynced) {
      slot.add_(full_view(unsynced_grad_, i));
    } else if (is_unsynced) {
      slot.copy_(full_view(unsynced_grad_, i));
    } else if (!has_gradient_[i]) {
      slot.zero_();
    }
    was_reduced_[i] = was_reduced_[i] || has_gradient_[i] || is_unsynced;
  }
  zero_padding(unsharded_grad_);
  drop_unsynced_gradients();
  has_gradient_.assign(has_gradient_.size(), false);
  num_gradients_ = 0;

  streams_->make_wait(streams_->post_backward, streams_->compute());
  const c10::StreamGuard on(streams_->post_backward);
  unsharded_grad_in_flight_ = std::exchange(unsharded_grad_, Tensor());
  if (is_sharded()) {
    sharded_grad_in_flight_ =
        torch::empty({sharded_flat_param_.numel()}, unsharded_grad_in_flight_.options());
    reduce_ = options_.shard_group->reduce_scatter(sharded_grad_in_flight_,
                                                   unsharded_grad_in_flight_, display_name());
    if (streams_->run_behind_host()) start_all_reduce();
  } else {
    sharded_grad_in_flight_ = unsharded_grad_in_flight_;
    reduce_ = options_.replicate_group->all_reduce(sharded_grad_in_flight_, display_name());
  }
}

/// Starts the second half of a hybrid strategy's average, after the first.
void FlatParamHandle::start_all_reduce() {
  if (options_.replicate_group->size() == 1 || std::exchange(is_all_reducing_, true)) return;
  reduce_.wait();
  streams_->make_wait(streams_->all_reduce, streams_->post_backward);
  const c10::StreamGuard on(streams_->all_reduce);
  reduce_ = options_.replicate_group->all_reduce(sharded_grad_in_flight_, display_name());
}

void FlatParamHandle::finish_reduce() {
  if (!is_reducing()) return;
  const at::NoGradGuard no_grad;
  {
    const c10::StreamGuard on(streams_->post_backward);
    if (is_sharded()) start_all_reduce();
    reduce_.wait();
    if (const double factor = num_averaged() / predivide_factor(num_averaged()); factor > 1) {
      sharded_grad_in_flight_.div_(factor);
    }
    Tensor reduced = sharded_grad_in_flight_;
    if (options_.mixed_precision.gradients == MixedPrecision::Gradients::master_dtype) {
      reduced = reduced.to(sharded_flat_param_.scalar_type());
    }
    reduced = reduced.to(sharded_flat_param_.device());
    if (sharded_grad_.defined()) {
      sharded_grad_.add_(reduced);
    } else {
      sharded_grad_ = std::move(reduced);
    }
  }
  // Their memory belongs to the compute stream, which must wait before it is freed.
  streams_->make_wait(streams_->compute(), streams_->post_backward);
  sharded_grad_in_flight_ = Tensor();
  if (is_sharded()) memory_->gradients.free(unsharded_grad_in_flight_);
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
      Tensor slot = full_view(unsynced_grad_, i);
      has_unsynced_[i] ? slot.add_(full_view(unsharded_grad_, i))
                       : slot.copy_(full_view(unsharded_grad_, i));
      has_unsynced_[i] = true;
    }
    unsharded_grad_ = Tensor();
  }
  has_gradient_.assign(has_gradient_.size(), false);
  num_gradients_ = 0;
}

}  // namespace tessera::fsdp
