#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "runtime/embedding/outgoing_batch.h"

namespace tessera::embedding {

/// Makes the second message (see Input) of a batch that is on a device. `num_ids` is a tensor on
/// the device, because the host does not know how many of the batch's ids are in a shard of rows.
/// Works on the current stream.
class DevicePacking {
 public:
  /// `batch` and `outgoing` must outlive this object, and must not move.
  DevicePacking(const TableBatch& batch, const std::vector<Outgoing>& outgoing);

  /// Returns the number of ids of each element of `outgoing`. Undefined if each element sends all
  /// ids of its slice. Shape: `[outgoing]` int64, on the device.
  const at::Tensor& num_ids() const { return num_ids_; }
  /// Returns the message. Requires: `num_ids` is set in each element of `outgoing`.
  at::Tensor message(int num_ranks) const;
  /// Returns the positions in the batch of the ids in `message`, in the same order.
  at::Tensor positions() const;

 private:
  /// The ids that one Outgoing sends. The tensors have room for all ids of the slice; the ids to
  /// send are at the beginning.
  struct Selected {
    at::Tensor lengths;    // [batch_size]
    at::Tensor ids;        // rows of the shard
    at::Tensor weights;    // undefined: the batch has none
    at::Tensor positions;  // positions in the batch; undefined: all of the slice
    at::Tensor num_ids;    // [1]; undefined: all of the slice
  };
  Selected select(const Outgoing& outgoing) const;

  const TableBatch& batch_;
  const std::vector<Outgoing>& outgoing_;
  std::vector<Selected> selected_;
  at::Tensor num_ids_;
};

/// Returns whether any id of the batch is out of the range of its table. Shape: `[]` bool, on the
/// device of the batch.
at::Tensor has_bad_ids(const TableSet& tables, const TableBatch& batch);

}  // namespace tessera::embedding
