#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "runtime/fsdp/flat_param_contents.h"
#include "runtime/fsdp/touch_dispatch.h"

namespace tessera::fsdp {

/// The memory of a flat parameter. Makes the parameters views of shards or of full shapes.
///
/// Owns this rank's shard, which lives as long as this object, and, if `has_own_full_buffer`, the
/// buffer of gathered parameters, whose memory FlatParamGather allocates and frees. `set_data`
/// switches a parameter between its elements in the shard and its full shape in the buffer; its
/// TensorImpl stays the same, because module and optimizer hold it. Operators that use this memory
/// call the listener ([Note: Touch]); without a buffer, only under Tracing::on. Not thread-safe.
class FlatParamStorage {
 public:
  /// Copies this rank's shard of each parameter. The parameters themselves do not change.
  /// `contents` and `listener` must outlive this object.
  FlatParamStorage(const FlatParamContents& contents,
                   const std::vector<ManagedParameter>& parameters, TouchListener& listener);

  /// Returns the device of gathered parameters.
  at::Device compute_device() const { return compute_device_; }
  /// Returns this rank's shard, in the parameters' own dtype. Shape: [sharded_numel].
  const at::Tensor& sharded_flat_param() const { return sharded_flat_param_; }
  /// Returns the buffer of gathered parameters, in param_dtype. Shape: [padded numel]. Undefined if
  /// gathered parameters need no buffer of their own.
  const at::Tensor& unsharded_flat_param() const { return unsharded_flat_param_; }
  /// Returns whether gathered parameters need a buffer of their own. They do if they are sharded,
  /// cast, or on another device than the shard.
  bool has_own_full_buffer() const { return !full_views_.empty(); }

  // --- the tensors of which parameters are views
  /// Makes each parameter a view of its elements in the shard. Skips destroyed parameters.
  void show_shards();
  /// `on`: the listener hears of every use of a parameter in a pass. `off`: the listener hears of
  /// uses only if the parameters have a full buffer (`has_own_full_buffer`).
  enum class Tracing { off, on };
  /// Gives parameters their full shapes for a pass. Requires: `check_parameters` has passed.
  void show_full(Tracing tracing);
  /// Ends `show_full`: parameters are views of the shard again.
  void hide_full();
  /// Throws: Error(invalid_argument) naming a parameter that was replaced, moved or converted.
  void check_parameters() const;

  // --- writes that would be lost, because they went into the buffer
  /// Returns the index of the last parameter that was written to since `show_full`; nullopt if none
  /// was, or if there is no buffer: a write then goes into the shard and is kept.
  std::optional<std::size_t> written_parameter() const;
  /// Makes `written_parameter` ignore all writes so far.
  void forget_writes();

  // --- which memory a tensor is in
  bool is_in_shard(const at::Tensor& tensor) const {
    return tensor.storage().is_alias_of(sharded_flat_param_.storage());
  }
  /// Returns the index of the parameter in whose memory `view` begins. `view`: a view of the shard
  /// or of the buffer.
  std::size_t parameter_at(const at::Tensor& view) const;

 private:
  void copy_own_shard(const std::vector<ManagedParameter>& parameters);
  void make_full_buffer(const at::TensorOptions& own);

  const FlatParamContents& contents_;
  TouchListener& listener_;
  at::Device compute_device_;
  at::Tensor sharded_flat_param_;
  at::Tensor unsharded_flat_param_;        // without memory while sharded
  std::vector<at::Tensor> sharded_views_;  // views of sharded_flat_param_, one per parameter
  std::vector<at::Tensor> full_views_;     // views of unsharded_flat_param_, with the touch key
  // Version counters of the parameters at show_full or forget_writes.
  std::vector<std::uint32_t> versions_;
  // Both registrations use the address of a storage as key, so they are destroyed before the
  // storage. Without a buffer, only `full_registration_` exists; it then watches the shard while a
  // pass is traced.
  std::optional<TouchRegistration> sharded_registration_;
  std::optional<TouchRegistration> full_registration_;
};

}  // namespace tessera::fsdp
