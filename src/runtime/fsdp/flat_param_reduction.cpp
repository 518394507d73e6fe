#include "runtime/fsdp/flat_param_reduction.h"

#include <c10/core/StreamGuard.h>
#include <torch/types.h>

#include <utility>

#include "tessera/base/error.h"

namespace tessera::fsdp {

using at::Tensor;

void FlatParamReduction::enter_pass(const std::shared_ptr<const Streams>& streams,
                                    const std::shared_ptr<SpareMemory>& memory) {
  streams_ = streams;
  memory_ = memory;
}

Tensor FlatParamReduction::make_unsharded_grad() {
  const bool is_spare =
      shown_.defined() && !shown_.is_same(sharded_grad_) && shown_.storage().use_count() == 1;
  if (is_spare) return std::exchange(shown_, Tensor());
  Tensor grad = torch::empty(
      {0}, at::TensorOptions(storage_.compute_device()).dtype(contents_.reduce_dtype()));
  grad.unsafeGetTensorImpl()->set_sizes_contiguous(
      {storage_.sharded_flat_param().numel() * contents_.num_shards()});
  memory_->allocate(grad);
  return grad;
}

/// Returns the number by which gradients are divided before the sum over the ranks; `finish` does
/// the rest of the division after it. In half precision, a single division could overflow or
/// underflow. The factors are those of PyTorch's FSDP, so that results round equally.
double FlatParamReduction::predivide_factor() const {
  const int num_ranks = contents_.num_averaged();
  int factor = 1;
  while (num_ranks % factor == 0 && num_ranks / factor > factor) factor *= 2;
  return factor;
}

void FlatParamReduction::start(Tensor unsharded_grad) {
  TESSERA_CHECK(!is_in_flight());
  streams_->make_wait(streams_->post_backward, streams_->compute());
  const c10::StreamGuard on(streams_->post_backward);
  unsharded_grad_ = std::move(unsharded_grad);
  if (contents_.is_sharded()) {
    sharded_grad_in_flight_ =
        torch::empty({storage_.sharded_flat_param().numel()}, unsharded_grad_.options());
    pending_ = contents_.shard_group().reduce_scatter(sharded_grad_in_flight_, unsharded_grad_,
                                                      contents_.display_name());
    if (streams_->run_behind_host()) start_all_reduce();
  } else {
    sharded_grad_in_flight_ = unsharded_grad_;
    pending_ =
        contents_.replicate_group().all_reduce(sharded_grad_in_flight_, contents_.display_name());
  }
}

/// For hybrid strategies: starts the all-reduce, which comes after the reduce-scatter.
void FlatParamReduction::start_all_reduce() {
  if (contents_.replicate_group().size() == 1 || std::exchange(is_all_reducing_, true)) return;
  pending_.wait();
  streams_->make_wait(streams_->all_reduce, streams_->post_backward);
  const c10::StreamGuard on(streams_->all_reduce);
  pending_ =
      contents_.replicate_group().all_reduce(sharded_grad_in_flight_, contents_.display_name());
}

void FlatParamReduction::finish() {
  if (!is_in_flight()) return;
  const at::NoGradGuard no_grad;
  {
    const c10::StreamGuard on(streams_->post_backward);
    if (contents_.is_sharded()) start_all_reduce();
    pending_.wait();
    if (const double factor = contents_.num_averaged() / predivide_factor(); factor > 1) {
      sharded_grad_in_flight_.div_(factor);
    }
    Tensor reduced = sharded_grad_in_flight_;
    if (contents_.options().mixed_precision.gradients == MixedPrecision::Gradients::master_dtype) {
      reduced = reduced.to(contents_.own_dtype());
    }
    reduced = reduced.to(storage_.sharded_flat_param().device());
    if (sharded_grad_.defined()) {
      sharded_grad_.add_(reduced);
    } else {
      const bool will_be_shown = reduced.is_same(unsharded_grad_) && reduced.is_cpu();
      if (will_be_shown && !shown_.defined()) shown_ = reduced;
      sharded_grad_ = std::move(reduced);
    }
  }
  // The allocator may give the gradients' memory to later work on the compute stream. So that
  // stream waits for the reduction before the memory is freed.
  streams_->make_wait(streams_->compute(), streams_->post_backward);
  sharded_grad_in_flight_ = Tensor();
  if (contents_.is_sharded()) memory_->free(unsharded_grad_);
  unsharded_grad_ = Tensor();
  is_all_reducing_ = false;
}

void FlatParamReduction::abort() noexcept {
  is_all_reducing_ = false;
  try {
    pending_.wait();
  } catch (const std::exception&) {
    // Ignored: the caller is already throwing the first error.
  }
  unsharded_grad_ = sharded_grad_in_flight_ = Tensor();
}

}  // namespace tessera::fsdp
