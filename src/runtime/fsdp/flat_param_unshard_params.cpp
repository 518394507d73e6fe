#include <torch/types.h>

#include "runtime/fsdp/flat_param_handle.h"
#include "tessera/base/error.h"

// Whole parameters outside of a pass: what unshard_params shows.

namespace tessera::fsdp {

using at::Tensor;

namespace {

bool are_same(const UnshardParamsOptions& a, const UnshardParamsOptions& b) {
  return a.writeback == b.writeback && a.rank0_only == b.rank0_only &&
         a.offload_to_cpu == b.offload_to_cpu && a.with_grads == b.with_grads;
}

}  // namespace

/// Whether this rank shows whole parameters in the open scope.
bool FlatParamHandle::shows_whole() const {
  return !whole_->options.rank0_only ||
         (contents_.shard_group().rank() == 0 && contents_.replicate_group().rank() == 0);
}

/// All-gathers a sharded flat tensor into new memory, if this rank shows it.
Tensor FlatParamHandle::gather_whole(const Tensor& flat_shard) const {
  Tensor whole;
  if (contents_.is_sharded()) {
    const Tensor part = flat_shard.to(storage_.compute_device());
    whole = torch::empty({part.numel() * contents_.num_shards()}, part.options());
    contents_.shard_group().all_gather(whole, part, contents_.display_name()).wait();
  } else if (shows_whole()) {
    whole = flat_shard.clone();
  }
  if (!shows_whole()) return {};
  return whole_->options.offload_to_cpu ? whole.to(at::kCPU) : whole;
}

/// Returns this rank's parts of all gradients in a row, with zeros for missing ones.
Tensor FlatParamHandle::flat_sharded_grads() const {
  at::ScalarType dtype = storage_.sharded_flat_param().scalar_type();
  if (const MixedPrecision& precision = contents_.options().mixed_precision;
      precision.gradients == MixedPrecision::Gradients::low_precision) {
    dtype = precision.reduce_dtype.value_or(precision.param_dtype.value_or(dtype));
  }
  Tensor flat = torch::zeros({storage_.sharded_flat_param().numel()},
                             storage_.sharded_flat_param().options().dtype(dtype));
  for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
    if (whole_->sharded_grads[i].defined())
      contents_.sharded_view(flat, i).copy_(whole_->sharded_grads[i]);
  }
  return flat;
}

/// Returns for which parameters any rank of the shard group has a gradient.
std::vector<bool> FlatParamHandle::have_grads() const {
  const std::vector<Tensor>& grads = whole_->sharded_grads;
  Tensor counts = torch::zeros({static_cast<std::int64_t>(grads.size())}, at::kInt);
  for (std::size_t i = 0; i < grads.size(); ++i) counts.data_ptr<int>()[i] = grads[i].defined();
  counts = counts.to(contents_.shard_group().device());
  contents_.shard_group().all_reduce(counts, contents_.display_name()).wait();
  counts = counts.to(at::kCPU);
  return std::vector<bool>(counts.data_ptr<int>(), counts.data_ptr<int>() + grads.size());
}

void FlatParamHandle::show_whole(const UnshardParamsOptions& options) {
  if (is_in_pass_) {
    contents_.refuse(ErrorKind::invalid_argument, 0, "unshard_params outside of a pass",
                     "one within it", "a loss whose backward has not run?");
  }
  if (whole_) {
    if (!are_same(whole_->options, options)) {
      contents_.refuse(ErrorKind::invalid_argument, 0,
                       "a nested unshard_params with the outer one's options", "other ones");
    }
    ++whole_->depth;
    return;
  }
  const at::NoGradGuard no_grad;
  storage_.check_parameters();
  whole_.emplace();
  whole_->options = options;
  try {
    for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
      whole_->sharded_grads.push_back(contents_.parameter(i).grad());
    }
    whole_->flat = gather_whole(storage_.sharded_flat_param());
    if (options.with_grads) {
      whole_->has_grad = have_grads();
      whole_->flat_grad = gather_whole(flat_sharded_grads());
    }
  } catch (...) {
    whole_.reset();
    throw;
  }
  for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
    Tensor shown = contents_.parameter(i);
    shown.mutable_grad() = Tensor();
    if (!shows_whole()) continue;
    shown.set_data(contents_.full_view(whole_->flat, i));
    if (options.with_grads && whole_->has_grad[i]) {
      Tensor gradient = torch::empty({0}, whole_->flat_grad.options());
      gradient.set_data(contents_.full_view(whole_->flat_grad, i));
      shown.mutable_grad() = std::move(gradient);
    }
  }
}

/// Copies tensors that were assigned to parameters or gradients (instead of their views) into
/// `flat`. Returns the index of one that does not fit.
std::optional<std::size_t> FlatParamHandle::take_written(const Tensor& flat,
                                                         const std::vector<Tensor>& shown) const {
  std::optional<std::size_t> unfit;
  for (std::size_t i = 0; i < shown.size(); ++i) {
    if (!shown[i].defined() || shown[i].storage().is_alias_of(flat.storage())) continue;
    const Tensor slot = contents_.full_view(flat, i);
    if (slot.sizes() == shown[i].sizes()) {
      slot.copy_(shown[i]);
    } else {
      unfit = i;
    }
  }
  return unfit;
}

/// Replaces each rank's `part` by its part of rank 0's `flat`, without extra memory.
void FlatParamHandle::take_from_first(const Tensor& flat, Tensor part) const {
  Tensor received = part.to(storage_.compute_device());
  if (contents_.replicate_group().rank() == 0) {
    const Tensor whole = flat.defined() ? flat.to(storage_.compute_device()) : flat;
    contents_.shard_group().scatter(received, whole, 0, contents_.display_name());
  }
  contents_.replicate_group().broadcast(received, 0, contents_.display_name()).wait();
  if (!received.is_same(part)) part.copy_(received);
}

/// Replaces `part` by this rank's part of `flat`, as written by this rank or by rank 0.
void FlatParamHandle::write_back(const Tensor& flat, const Tensor& part) const {
  if (whole_->options.rank0_only) return take_from_first(flat, part);
  part.copy_(contents_.is_sharded()
                 ? flat.narrow(0, contents_.shard_group().rank() * part.numel(), part.numel())
                 : flat);
}

void FlatParamHandle::hide_whole() {
  if (--whole_->depth > 0) return;
  const at::NoGradGuard no_grad;
  std::vector<Tensor> shown;
  std::vector<Tensor> shown_grads;
  for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
    shown.push_back(contents_.parameter(i));
    shown_grads.push_back(shown[i].defined() ? shown[i].mutable_grad() : Tensor());
  }
  std::optional<std::size_t> unfit;
  std::exception_ptr failure;
  if (whole_->options.writeback) {
    try {
      if (shows_whole()) unfit = take_written(whole_->flat, shown);
      write_back(whole_->flat, storage_.sharded_flat_param());
      if (whole_->options.with_grads) {
        const Tensor grads = flat_sharded_grads();
        if (shows_whole()) {
          const auto unfit_grad = take_written(whole_->flat_grad, shown_grads);
          if (!unfit) unfit = unfit_grad;
        }
        write_back(whole_->flat_grad, grads);
        for (std::size_t i = 0; i < shown.size(); ++i) {
          Tensor& gradient = whole_->sharded_grads[i];
          if (gradient.defined()) gradient.copy_(contents_.sharded_view(grads, i));
        }
      }
    } catch (...) {
      failure = std::current_exception();
    }
  }
  storage_.show_shards();
  for (std::size_t i = 0; i < shown.size(); ++i) {
    if (!shown[i].defined()) continue;
    shown[i].mutable_grad() = whole_->sharded_grads[i];
  }
  whole_.reset();
  if (failure) std::rethrow_exception(failure);
  if (unfit) {
    contents_.refuse(ErrorKind::invalid_argument, *unfit, "data of the parameter's own shape",
                     "another one", "set_data within unshard_params?");
  }
}

}  // namespace tessera::fsdp
