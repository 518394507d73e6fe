#include "runtime/fsdp/flat_param_storage.h"

#include <ATen/DeviceAccelerator.h>
#include <torch/types.h>

#include "runtime/fsdp/spare_memory.h"
#include "runtime/torch_bridge.h"

namespace tessera::fsdp {
namespace {

using at::Tensor;

std::uint32_t version_of(const Tensor& tensor) {
  return static_cast<std::uint32_t>(tensor._version());
}

}  // namespace

FlatParamStorage::FlatParamStorage(const FlatParamContents& contents,
                                   const std::vector<ManagedParameter>& parameters,
                                   TouchListener& listener)
    : contents_(contents),
      listener_(listener),
      compute_device_(parameters.front().tensor.device()) {
  const at::NoGradGuard no_grad;
  copy_own_shard(parameters);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    sharded_views_.push_back(contents_.sharded_view(sharded_flat_param_, i));
  }
  if (contents_.is_sharded() || dtype_of(contents_.param_dtype()) != contents_.unit().dtype ||
      sharded_flat_param_.device() != compute_device_) {
    make_full_buffer(parameters.front().tensor.options());
  }
}

/// Concatenates the parameters, and keeps this rank's shard.
void FlatParamStorage::copy_own_shard(const std::vector<ManagedParameter>& parameters) {
  const dist::Group& shard_group = contents_.shard_group();
  const std::int64_t shard_numel = sharded_numel(contents_.unit(), shard_group.size());
  Tensor flat = torch::empty({shard_numel * contents_.num_shards()},
                             parameters.front().tensor.options().requires_grad(false));
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    contents_.full_view(flat, i).copy_(parameters[i].tensor);
  }
  contents_.zero_padding(flat);
  sharded_flat_param_ = contents_.is_sharded()
                            ? flat.narrow(0, shard_group.rank() * shard_numel, shard_numel).clone()
                            : flat;
  if (contents_.options().offload == Offload::params) {
    sharded_flat_param_ = sharded_flat_param_.to(at::kCPU);
    if (at::isAccelerator(compute_device_.type())) {
      sharded_flat_param_ = sharded_flat_param_.pin_memory();
    }
  }
}

/// Makes the buffer of gathered parameters and a view of it for each parameter, and then frees the
/// buffer's memory. `own`: dtype and device of the parameters.
void FlatParamStorage::make_full_buffer(const at::TensorOptions& own) {
  for (Tensor& view : sharded_views_) view = with_touch_key(view);
  sharded_registration_.emplace(sharded_flat_param_.storage(), listener_);
  unsharded_flat_param_ = torch::empty({sharded_flat_param_.numel() * contents_.num_shards()},
                                       own.requires_grad(false).dtype(contents_.param_dtype()));
  // Views can be made only while the buffer has memory.
  for (std::size_t i = 0; i < sharded_views_.size(); ++i) {
    full_views_.push_back(with_touch_key(contents_.full_view(unsharded_flat_param_, i)));
  }
  full_registration_.emplace(unsharded_flat_param_.storage(), listener_);
  SpareMemory().free(unsharded_flat_param_);
}

void FlatParamStorage::show_shards() {
  for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
    if (Tensor shown = contents_.parameter(i); shown.defined()) shown.set_data(sharded_views_[i]);
  }
}

void FlatParamStorage::show_full(Tracing tracing) {
  versions_.clear();
  const bool sees_shard = !has_own_full_buffer() && tracing == Tracing::on;
  for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
    Tensor shown = contents_.parameter(i);
    if (has_own_full_buffer()) {
      shown.set_data(full_views_[i]);
    } else if (sees_shard) {
      shown.set_data(with_touch_key(sharded_views_[i]));
    }
    versions_.push_back(version_of(shown));
  }
  if (sees_shard) full_registration_.emplace(sharded_flat_param_.storage(), listener_);
}

void FlatParamStorage::hide_full() {
  if (!full_registration_)
    return;  // the pass is not traced: parameters are views of the shard without the touch key
  if (!has_own_full_buffer()) full_registration_.reset();
  show_shards();
}

void FlatParamStorage::check_parameters() const {
  for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
    const Tensor shown = contents_.parameter(i);
    if (!shown.defined()) {
      contents_.refuse(ErrorKind::invalid_argument, i,
                       "the parameter that was there when fully_shard was called",
                       "a parameter that was destroyed", "was it replaced in its module?");
    }
    if (!is_in_shard(shown)) {
      contents_.refuse(ErrorKind::invalid_argument, i, "a view of the flat parameter",
                       "other memory",
                       "was module->to(), set_data or torch::load called after fully_shard?");
    }
  }
}

std::optional<std::size_t> FlatParamStorage::written_parameter() const {
  if (!has_own_full_buffer()) return std::nullopt;  // a write goes into the shard itself
  for (std::size_t i = contents_.num_parameters(); i-- > 0;) {
    const Tensor shown = contents_.parameter(i);
    if (shown.defined() && version_of(shown) != versions_[i]) return i;
  }
  return std::nullopt;
}

void FlatParamStorage::forget_writes() {
  for (std::size_t i = 0; i < contents_.num_parameters(); ++i) {
    const Tensor shown = contents_.parameter(i);
    if (shown.defined()) versions_[i] = version_of(shown);
  }
}

std::size_t FlatParamStorage::parameter_at(const Tensor& view) const {
  std::int64_t position = view.storage_offset();
  if (contents_.is_sharded() && is_in_shard(view)) {
    position += contents_.shard_group().rank() * sharded_flat_param_.numel();
  }
  return contents_.parameter_at(position);
}

}  // namespace tessera::fsdp
