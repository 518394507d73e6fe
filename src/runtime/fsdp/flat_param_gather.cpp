#include "runtime/fsdp/flat_param_gather.h"

#include <c10/core/StreamGuard.h>
#include <torch/types.h>

#include <limits>

namespace tessera::fsdp {
namespace {

using at::Tensor;

bool has_memory(const Tensor& tensor) {
  return tensor.storage().nbytes() > 0;
}

}  // namespace

void FlatParamGather::enter_pass(const std::shared_ptr<const Streams>& streams,
                                 const std::shared_ptr<SpareMemory>& memory) {
  streams_ = streams;
  memory_ = memory;
}

/// Returns this rank's shard in the dtype and on the device of gathered parameters.
Tensor FlatParamGather::cast_own_shard() const {
  const c10::StreamGuard on(streams_->pre_unshard);
  return storage_.sharded_flat_param().to(storage_.compute_device(),
                                          storage_.unsharded_flat_param().scalar_type(),
                                          /*non_blocking=*/true);
}

void FlatParamGather::prepare() {
  if (residence_ != Residence::sharded || !storage_.has_own_full_buffer()) return;
  const at::NoGradGuard no_grad;
  cast_shard_ = cast_own_shard();
}

void FlatParamGather::start() {
  if (residence_ != Residence::sharded || !storage_.has_own_full_buffer()) return;
  const at::NoGradGuard no_grad;
  streams_->make_wait(streams_->unshard, streams_->pre_unshard);
  const c10::StreamGuard on(streams_->unshard);
  const Tensor& unsharded = storage_.unsharded_flat_param();
  if (!has_memory(unsharded)) memory_->allocate(unsharded);
  residence_ = Residence::gathering;
  pending_ = contents_.shard_group().all_gather(unsharded, cast_shard_, contents_.display_name());
}

void FlatParamGather::finish() {
  if (residence_ != Residence::gathering) return;
  residence_ = Residence::unsharded;
  {
    const c10::StreamGuard on(streams_->unshard);
    pending_.wait();
  }
  streams_->make_wait(streams_->compute(), streams_->unshard);
  streams_->note_use(cast_shard_, streams_->unshard);
  cast_shard_ = Tensor();
}

void FlatParamGather::join() {
  if (!contents_.is_sharded()) return;
  const at::NoGradGuard no_grad;
  const Tensor shard = cast_own_shard();
  streams_->make_wait(streams_->unshard, streams_->pre_unshard);
  const c10::StreamGuard on(streams_->unshard);
  const Tensor& unsharded = storage_.unsharded_flat_param();
  const Tensor whole = torch::empty({unsharded.numel()}, unsharded.options());
  contents_.shard_group().all_gather(whole, shard, contents_.display_name()).wait();
  streams_->note_use(shard, streams_->unshard);
}

void FlatParamGather::reshard() {
  finish();
  if (!is_unsharded()) return;
  const Tensor& unsharded = storage_.unsharded_flat_param();
  if (contents_.options().freed_parameters == FreedParameters::poisoned) {
    const at::NoGradGuard no_grad;
    unsharded.fill_(std::numeric_limits<double>::quiet_NaN());
    streams_->make_wait(streams_->unshard, streams_->compute());
  } else {
    streams_->note_use(unsharded, streams_->compute());
    memory_->free(unsharded);
  }
  residence_ = Residence::sharded;
}

void FlatParamGather::abort() noexcept {
  try {
    pending_.wait();
  } catch (const std::exception&) {
    // Ignored: the caller is already throwing the first error.
  }
  if (residence_ == Residence::gathering) residence_ = Residence::unsharded;
  cast_shard_ = Tensor();
}

}  // namespace tessera::fsdp
