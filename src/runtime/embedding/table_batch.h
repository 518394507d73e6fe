#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/runtime/embedding/embedding_bag_collection.h"

namespace tessera::embedding {

/// A batch of ids, and its slices: one for each output of a set of tables, with the ids that this
/// output looks up.
struct TableBatch {
  std::int64_t batch_size = 0;
  at::Tensor ids;      // [N] int64
  at::Tensor lengths;  // [keys * batch_size] int64
  at::Tensor offsets;  // [keys * batch_size + 1] int64
  at::Tensor weights;  // [N] float32; undefined if the batch has none
  struct Slice {       // the ids and bags of one output
    std::int64_t begin = 0;
    std::int64_t end = 0;        // the output has the ids [begin, end) of `ids`
    std::int64_t first_bag = 0;  // index of its first bag in `lengths`
    bool is_missing = false;     // the batch lacks the feature: all bags are empty
  };
  std::vector<Slice> slices;  // one per item of TableSet::outputs

  bool is_on_host() const { return ids.is_cpu(); }
  /// Returns how many ids a sample's bag has. Requires: the batch is on the host.
  std::int64_t length(const Slice& slice, std::int64_t sample) const {
    return slice.is_missing ? 0 : lengths.const_data_ptr<std::int64_t>()[slice.first_bag + sample];
  }
};

/// Finds the ids of each output, for tables on `device`. The batch is in host memory or on this
/// device. Throws: Error(invalid_argument) naming a missing feature (unless allowed), a problem
/// with weights, a tensor on another device, or table, feature, sample and position of an id out of
/// range. Ids on a device are not checked, because that would make the host wait.
TableBatch batch_for(const TableSet& tables, const KeyedJaggedTensor& batch, at::Device device);

/// Divides the columns of `pooled` that have mean pooling by the number of ids in each bag, in
/// place. Does not change empty bags. `pooled`: shape `[batch_size, output_width]`, contiguous,
/// float32. `lengths`: the lengths of the batch, on the device of `pooled`.
void divide_means(const TableSet& tables, const TableBatch& batch, const at::Tensor& lengths,
                  at::Tensor pooled);

}  // namespace tessera::embedding
