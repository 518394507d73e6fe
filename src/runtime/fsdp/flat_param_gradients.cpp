#include "runtime/fsdp/flat_param_gradients.h"

#include <torch/types.h>

#include <utility>

#include "runtime/fsdp/touch_dispatch.h"
#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"

namespace tessera::fsdp {

using at::Tensor;

Tensor sharded_gradient(const FlatParamContents& contents, const Tensor& elements) {
  Tensor gradient = torch::empty({0}, elements.options());
  gradient.set_data(contents.is_sharded() ? with_touch_key(elements) : elements);
  return gradient;
}

FlatParamGradients::FlatParamGradients(const FlatParamContents& contents,
                                       const FlatParamStorage& storage)
    : contents_(contents),
      are_reduced_(storage.has_own_full_buffer() || contents.replicate_group().size() > 1 ||
                   dtype_of(contents.reduce_dtype()) != contents.unit().dtype),
      reduction_(contents, storage) {
  const std::size_t num_parameters = contents.num_parameters();
  taken_.has.resize(num_parameters);
  unsynced_.has.resize(num_parameters);
  was_reduced_.resize(num_parameters);
  put_aside_.resize(num_parameters);
}

void FlatParamGradients::FlatGradient::clear() {
  flat = Tensor();
  has.assign(has.size(), false);
}

void FlatParamGradients::clear_taken() {
  taken_.clear();
  num_taken_ = 0;
}

void FlatParamGradients::enter_pass(const std::shared_ptr<const Streams>& streams,
                                    const std::shared_ptr<SpareMemory>& memory) {
  num_trainable_ = 0;
  for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
    if (contents_.parameter(i).requires_grad()) ++num_trainable_;
    was_reduced_[i] = false;
    put_aside_[i].reset();
  }
  reduction_.enter_pass(streams, memory);
}

void FlatParamGradients::put_aside(std::size_t index) {
  if (!are_reduced_ || put_aside_[index]) return;
  put_aside_[index] = std::exchange(contents_.parameter(index).mutable_grad(), Tensor());
}

void FlatParamGradients::take(std::size_t index) {
  const Tensor parameter = contents_.parameter(index);
  const Tensor gradient = std::exchange(parameter.mutable_grad(), Tensor());
  TESSERA_CHECK(gradient.defined());
  if (gradient.layout() != at::kStrided) {
    contents_.refuse(ErrorKind::unsupported, index, "a dense gradient", "a sparse gradient",
                     "is it an embedding with sparse(true)?");
  }
  if (gradient.requires_grad()) {
    contents_.refuse(ErrorKind::unsupported, index, "a gradient without a graph",
                     "a gradient with a graph", "fully_shard does not support create_graph");
  }
  const at::NoGradGuard no_grad;
  if (!taken_.flat.defined()) taken_.flat = reduction_.make_unsharded_grad();
  Tensor slot = contents_.full_view(taken_.flat, index);
  const double share = 1 / reduction_.predivide_factor();  // exact: a power of 2
  if (taken_.has[index]) {
    slot.add_(gradient.to(slot.scalar_type()), share);
    return;
  }
  if (unsynced_.has[index]) {
    at::add_out(slot, contents_.full_view(unsynced_.flat, index), gradient.to(slot.scalar_type()),
                share);
  } else if (gradient.scalar_type() == slot.scalar_type()) {
    at::mul_out(slot, gradient, at::scalar_tensor(share));
  } else {
    slot.copy_(gradient).mul_(share);
  }
  taken_.has[index] = true;
  ++num_taken_;
}

/// Copies the gradients that earlier passes kept into the flat gradient, for parameters that have
/// no gradient in this pass.
void FlatParamGradients::take_unused_unsynced() {
  for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
    if (taken_.has[i] || !unsynced_.has[i]) continue;
    contents_.full_view(taken_.flat, i).copy_(contents_.full_view(unsynced_.flat, i));
    taken_.has[i] = true;
  }
}

void FlatParamGradients::start_reduce() {
  TESSERA_CHECK(!is_reducing());
  const at::NoGradGuard no_grad;
  if (!taken_.flat.defined()) taken_.flat = reduction_.make_unsharded_grad();
  take_unused_unsynced();
  for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
    if (taken_.has[i]) {
      was_reduced_[i] = true;
    } else {
      contents_.full_view(taken_.flat, i).zero_();
    }
  }
  contents_.zero_padding(taken_.flat);
  reuse_unsynced();
  Tensor unsharded_grad = std::move(taken_.flat);
  clear_taken();
  reduction_.start(std::move(unsharded_grad));
}

std::vector<bool> FlatParamGradients::contributed() const {
  std::vector<bool> all = was_reduced_;
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i] = all[i] || taken_.has[i] || unsynced_.has[i];
  }
  return all;
}

void FlatParamGradients::keep_unsynced() {
  if (!has_taken()) return;
  const at::NoGradGuard no_grad;
  take_unused_unsynced();
  reuse_unsynced();
  std::swap(unsynced_, taken_);
  clear_taken();
}

/// Drops the gradients of earlier passes and lets later gradients use their memory.
void FlatParamGradients::reuse_unsynced() {
  if (has_unsynced() && contents_.is_sharded()) reduction_.free(unsynced_.flat);
  unsynced_.clear();
}

void FlatParamGradients::leave_pass() {
  for (std::size_t i = 0; are_reduced_ && i < contents_.num_parameters(); ++i) {
    const Tensor parameter = contents_.parameter(i);
    if (!parameter.defined()) continue;
    Tensor gradient =
        put_aside_[i] ? std::exchange(*put_aside_[i], Tensor()) : Tensor(parameter.mutable_grad());
    if (was_reduced_[i] && reduction_.sharded_grad().defined()) {
      const Tensor reduced = contents_.sharded_view(reduction_.sharded_grad(), i);
      if (gradient.defined()) {
        gradient.add_(reduced);
      } else {
        gradient = sharded_gradient(contents_, reduced);
      }
    }
    parameter.mutable_grad() = std::move(gradient);
  }
  reduction_.drop_sharded_grad();
}

void FlatParamGradients::abort_pass() noexcept {
  reduction_.abort();
  clear_taken();
  was_reduced_.assign(was_reduced_.size(), false);
}

}  // namespace tessera::fsdp
