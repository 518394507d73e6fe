#include "runtime/fsdp/whole_parameters.h"

#include <torch/types.h>

#include <exception>

#include "runtime/fsdp/flat_param_gradients.h"
#include "runtime/fsdp/unshard_params_writeback.h"
#include "tessera/base/error.h"

namespace tessera::fsdp {
namespace {

using at::Tensor;

bool are_same(const UnshardParamsOptions& a, const UnshardParamsOptions& b) {
  return a.writeback == b.writeback && a.rank0_only == b.rank0_only &&
         a.offload_to_cpu == b.offload_to_cpu && a.with_grads == b.with_grads;
}

}  // namespace

// --- show

void WholeParameters::show(const UnshardParamsOptions& options) {
  if (scope_) {
    if (!are_same(scope_->options, options)) {
      contents_.refuse(ErrorKind::invalid_argument, 0,
                       "a nested unshard_params with the options of the outer one",
                       "different options");
    }
    ++scope_->depth;
    return;
  }
  const at::NoGradGuard no_grad;
  storage_.check_parameters();
  scope_.emplace();
  scope_->options = options;
  try {
    gather();
  } catch (...) {
    scope_.reset();
    throw;
  }
  show_gathered();
}

/// Returns whether this rank shows whole parameters in the open scope.
bool WholeParameters::shows_on_this_rank() const {
  return !scope_->options.rank0_only ||
         (contents_.shard_group().rank() == 0 && contents_.replicate_group().rank() == 0);
}

/// Gathers the whole parameters, and gradients, into the scope. The parameters do not change.
void WholeParameters::gather() {
  for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
    scope_->sharded_grads.push_back(contents_.parameter(i).grad());
  }
  scope_->flat = gather_whole(storage_.sharded_flat_param());
  if (scope_->options.with_grads) {
    scope_->has_grad = have_grads();
    scope_->flat_grad = gather_whole(flat_sharded_grads());
  }
}

/// Returns a flat tensor of all ranks' shards, in new memory unless one shard is whole. Returns an
/// undefined tensor on ranks that show no whole parameters.
Tensor WholeParameters::gather_whole(const Tensor& flat_shard) const {
  Tensor whole;
  if (contents_.is_sharded()) {
    const Tensor shard = flat_shard.to(storage_.compute_device());
    whole = torch::empty({shard.numel() * contents_.num_shards()}, shard.options());
    contents_.shard_group().all_gather(whole, shard, contents_.display_name()).wait();
  } else if (shows_on_this_rank()) {
    // One shard is whole. If writes are kept, it is shown itself, so that writes through views that
    // are older than the scope are kept too.
    const bool are_kept = scope_->options.writeback && !scope_->options.rank0_only;
    whole = are_kept ? flat_shard : flat_shard.clone();
  }
  if (!shows_on_this_rank()) return {};
  return scope_->options.offload_to_cpu ? whole.to(at::kCPU) : whole;
}

/// Returns this rank's shards of all gradients as one flat tensor, with zeros for missing
/// gradients.
Tensor WholeParameters::flat_sharded_grads() const {
  const Tensor& shard = storage_.sharded_flat_param();
  const bool have_own_dtype =
      contents_.options().mixed_precision.gradients == MixedPrecision::Gradients::master_dtype;
  const at::ScalarType dtype = have_own_dtype ? contents_.own_dtype() : contents_.reduce_dtype();
  Tensor flat = torch::zeros({shard.numel()}, shard.options().dtype(dtype));
  for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
    const Tensor& gradient = scope_->sharded_grads[i];
    if (gradient.defined()) contents_.sharded_view(flat, i).copy_(gradient);
  }
  return flat;
}

/// Returns for each parameter whether any rank of the shard group has a gradient. Collective.
std::vector<bool> WholeParameters::have_grads() const {
  const std::vector<Tensor>& grads = scope_->sharded_grads;
  Tensor counts = torch::zeros({static_cast<std::int64_t>(grads.size())}, at::kInt);
  for (std::size_t i = 0; i < grads.size(); ++i) counts.data_ptr<int>()[i] = grads[i].defined();
  counts = counts.to(contents_.shard_group().device());
  contents_.shard_group().all_reduce(counts, contents_.display_name()).wait();
  counts = counts.to(at::kCPU);
  return std::vector<bool>(counts.data_ptr<int>(), counts.data_ptr<int>() + grads.size());
}

/// Makes parameters and their gradients views of the gathered tensors.
void WholeParameters::show_gathered() {
  for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
    Tensor shown = contents_.parameter(i);
    shown.mutable_grad() = Tensor();
    if (!shows_on_this_rank()) continue;
    shown.set_data(contents_.full_view(scope_->flat, i));
    if (scope_->options.with_grads && scope_->has_grad[i]) {
      Tensor gradient = torch::empty({0}, scope_->flat_grad.options());
      gradient.set_data(contents_.full_view(scope_->flat_grad, i));
      shown.mutable_grad() = std::move(gradient);
    }
  }
}

// --- hide

void WholeParameters::hide() {
  if (--scope_->depth > 0) return;
  const at::NoGradGuard no_grad;
  std::optional<std::size_t> unfit;
  std::exception_ptr failure;
  if (scope_->options.writeback) {
    try {
      unfit = write_back_all();
    } catch (...) {
      failure = std::current_exception();
    }
  }
  storage_.show_shards();
  for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
    const Tensor shown = contents_.parameter(i);
    if (shown.defined()) shown.mutable_grad() = scope_->sharded_grads[i];
  }
  scope_.reset();
  if (failure) std::rethrow_exception(failure);
  if (unfit) {
    contents_.refuse(ErrorKind::invalid_argument, *unfit, "data of the parameter's own shape",
                     "data of another shape", "was set_data called within unshard_params?");
  }
}

/// Copies what was written to whole parameters and gradients into this rank's shards. Returns the
/// index of a parameter whose shape was changed, if there is one.
std::optional<std::size_t> WholeParameters::write_back_all() {
  const UnshardParamsOptions& options = scope_->options;
  WholeTensors parameters{scope_->flat, {}};
  WholeTensors gradients{scope_->flat_grad, {}};
  for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
    const Tensor shown = contents_.parameter(i);
    parameters.shown.push_back(shown);
    gradients.shown.push_back(shown.defined() ? shown.mutable_grad() : Tensor());
  }
  const at::Device compute_device = storage_.compute_device();
  std::optional<std::size_t> unfit =
      write_back(contents_, options, compute_device, parameters, storage_.sharded_flat_param());
  if (!options.with_grads) return unfit;
  const std::vector<bool> has_grad = have_grads_now(gradients.shown);
  const Tensor flat_grads = flat_sharded_grads();
  const auto unfit_gradient = write_back(contents_, options, compute_device, gradients, flat_grads);
  for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
    Tensor& gradient = scope_->sharded_grads[i];
    const Tensor written = contents_.sharded_view(flat_grads, i);
    if (!has_grad[i]) {
      gradient = Tensor();
    } else if (gradient.defined()) {
      gradient.copy_(written);
    } else {
      gradient = sharded_gradient(contents_, written.clone());
    }
  }
  return unfit ? unfit : unfit_gradient;
}

/// Returns for each parameter whether it has a gradient after the scope: the user may have cleared
/// gradients or made new ones. A gradient of a wrong shape counts as unchanged. With `rank0_only`
/// rank 0 decides for all ranks. `shown`: the gradients at the end of the scope. Collective with
/// `rank0_only`.
std::vector<bool> WholeParameters::have_grads_now(const std::vector<Tensor>& shown) const {
  const auto numel = static_cast<std::int64_t>(shown.size());
  Tensor flags = torch::zeros({numel}, at::kInt);
  for (std::size_t i = 0; i < shown.size(); ++i) {
    const bool fits =
        shown[i].defined() && shown[i].sizes() == contents_.unit().parameters[i].shape;
    flags.data_ptr<int>()[i] = fits || (shown[i].defined() && scope_->has_grad[i]) ? 1 : 0;
  }
  if (scope_->options.rank0_only) {
    dist::Group& world = *contents_.options().world_group;
    flags = flags.to(world.device());
    world.broadcast(flags, 0, contents_.display_name()).wait();
    flags = flags.to(at::kCPU);
  }
  return std::vector<bool>(flags.data_ptr<int>(), flags.data_ptr<int>() + numel);
}

}  // namespace tessera::fsdp
