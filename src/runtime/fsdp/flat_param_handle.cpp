#include "runtime/fsdp/flat_param_handle.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/types.h>

#include "runtime/registry/gradient_hook.h"
#include "runtime/registry/parameter_shards.h"
#include "tessera/base/error.h"

namespace tessera::fsdp {

using at::Tensor;

/// The post-accumulate hook of each parameter. Keeps the handle alive.
class FlatParamHandle::GradientHook final : public torch::autograd::PostAccumulateGradHook {
 public:
  GradientHook(std::shared_ptr<FlatParamHandle> handle, std::size_t index)
      : handle_(std::move(handle)), index_(index) {}
  void operator()(const Tensor& /*parameter*/) override {
    const auto events = handle_->events_.lock();
    if (!handle_->is_in_pass_ || !events) {
      handle_->contents_.refuse(
          ErrorKind::invalid_argument, index_, "a backward of a forward that tessera::forward ran",
          "a backward of another forward, whose gradients would not be reduced over the ranks",
          "was the module's own forward called? call tessera::forward instead");
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
      reshards_after_forward_(options.strategy == ShardingStrategy::full_shard ||
                              options.strategy == ShardingStrategy::hybrid_shard),
      contents_(unit_name, parameters, std::move(shared), std::move(options)),
      storage_(contents_, parameters, static_cast<TouchListener&>(*this)),
      gather_(contents_, storage_),
      gradients_(contents_, storage_),
      whole_(contents_, storage_) {}

FlatParamHandle::~FlatParamHandle() = default;

std::shared_ptr<FlatParamHandle> FlatParamHandle::of(const Tensor& parameter) {
  const auto* const hook = dynamic_cast<const GradientHook*>(registry::gradient_hook(parameter));
  return hook == nullptr ? nullptr : hook->handle();
}

void FlatParamHandle::join_root(std::weak_ptr<const void> root, const std::string& fqn) {
  if (!root_.expired()) {
    throw Error::expected(
        ErrorKind::invalid_argument, {.fqn = fqn}, "root of a fully sharded module", "one root",
        "a second root",
        "was tessera::forward or a NoSyncScope given both the model and a submodule? give them the "
        "model only");
  }
  root_ = std::move(root);
  contents_.set_unit_name(fqn);
}

void FlatParamHandle::check_tree(const std::unordered_set<const at::TensorImpl*>& in_tree) const {
  for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
    const Tensor shown = contents_.parameter(i);
    if (shown.defined() && in_tree.contains(shown.unsafeGetTensorImpl())) continue;
    contents_.refuse(ErrorKind::invalid_argument, i,
                     "the parameter that was there when fully_shard was called",
                     "no module that still has it", "was it replaced in its module?");
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
  // A parameter can have only one post-accumulate hook, and this is it; users can add hooks by
  // register_hook. Frozen parameters get the hook too, because they may be trained later. Hooks
  // need requires_grad, so it is set for a moment.
  const bool is_trained = parameter.requires_grad();
  parameter.set_requires_grad(true);
  parameter.register_hook([handle = shared_from_this(), index](const Tensor& /*gradient*/) {
    handle->gradient_comes(index);
  });
  parameter.set_requires_grad(is_trained);
}

void FlatParamHandle::show_whole(const UnshardParamsOptions& options) {
  if (is_in_pass_) {
    contents_.refuse(
        ErrorKind::invalid_argument, 0, "unshard_params outside of forward and backward",
        "unshard_params between a forward and its backward", "was loss.backward() not called?");
  }
  whole_.show(options);
}

StateTensor FlatParamHandle::state_of(std::size_t index) const {
  if (is_in_pass_ || is_whole()) {
    contents_.refuse(ErrorKind::invalid_argument, index,
                     "a state dict outside of forward, backward and unshard_params",
                     is_in_pass_ ? "a state dict between a forward and its backward"
                                 : "a state dict within unshard_params",
                     is_in_pass_ ? "was loss.backward() not called?" : "");
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
    state.local_shards.push_back(
        {std::move(region), contents_.sharded_view(storage_.sharded_flat_param(), index)});
  }
  return state;
}

// --- passes

void FlatParamHandle::enter_pass(const std::shared_ptr<HandleEvents>& events,
                                 const std::shared_ptr<const Streams>& streams,
                                 const std::shared_ptr<SpareMemory>& memory, Tracing tracing) {
  TESSERA_CHECK(!is_in_pass());
  if (is_whole()) {
    contents_.refuse(ErrorKind::invalid_argument, 0, "a tessera::forward outside of unshard_params",
                     "a tessera::forward within it",
                     "within unshard_params, call the module's own forward, without gradients");
  }
  const at::NoGradGuard no_grad;
  storage_.check_parameters();
  storage_.show_full(tracing);
  gather_.enter_pass(streams, memory);
  gradients_.enter_pass(streams, memory);
  events_ = events;
  is_in_pass_ = true;
}

void FlatParamHandle::refuse_write(std::size_t index) const {
  contents_.refuse(ErrorKind::invalid_argument, index,
                   "no write to the parameter between forward and the end of backward",
                   "a write, which is lost",
                   "is it clamped or renormalized inside forward, or is there an optimizer step "
                   "before backward?");
}

void FlatParamHandle::check_not_written() const {
  if (const auto written = storage_.written_parameter()) refuse_write(*written);
}

void FlatParamHandle::leave_pass() {
  TESSERA_CHECK(is_in_pass() && !gradients_.is_reducing() && !gradients_.has_taken());
  const std::optional<std::size_t> written = storage_.written_parameter();
  const at::NoGradGuard no_grad;
  const UntouchedScope untouched;
  is_in_pass_ = false;
  gather_.reshard();
  storage_.hide_full();
  gradients_.leave_pass();
  if (written) refuse_write(*written);
}

void FlatParamHandle::abort_pass() noexcept {
  if (!is_in_pass()) return;
  gather_.abort();
  gradients_.abort_pass();
  storage_.forget_writes();
  leave_pass();
}

void FlatParamHandle::touched(const Tensor& argument) {
  if (storage_.is_in_shard(argument) && storage_.has_own_full_buffer()) {
    if (!at::GradMode::is_enabled() || !argument.requires_grad())
      return;  // for example the optimizer's step
    contents_.refuse(
        ErrorKind::invalid_argument, storage_.parameter_at(argument),
        "use within tessera::forward or its backward", "use of this rank's shard outside of them",
        "was the module's own forward, or to(), called? call tessera::forward; to read this rank's "
        "shard, use NoGradGuard");
  }
  if (const auto events = events_.lock(); is_in_pass_ && events) {
    return events->parameter_touched(*this, storage_.parameter_at(argument));
  }
  contents_.refuse(ErrorKind::invalid_argument, storage_.parameter_at(argument),
                   "use within tessera::forward or its backward",
                   "use after its backward had ended",
                   "for a second backward, call tessera::forward again, or pass retain_graph and "
                   "use ForwardScope::watch; do not keep views of parameters");
}

void FlatParamHandle::gradient_comes(std::size_t index) {
  const auto events = events_.lock();
  if (!is_in_pass_ || !events) return;  // GradientHook will throw
  events->gradient_comes();
  gradients_.put_aside(index);
}

}  // namespace tessera::fsdp
