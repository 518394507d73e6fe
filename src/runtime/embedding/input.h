#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "runtime/embedding/table_batch.h"
#include "tessera/layout/region.h"
#include "tessera/runtime/dist/group.h"

namespace tessera::embedding {

/// A shard of a table on one rank.
struct Assignment {
  std::size_t table = 0;
  FlatRange rows;             // range of the table's rows
  FlatRange columns;          // range of the table's columns
  bool has_all_rows = false;  // `rows` are all rows of the table
  /// The outputs that look up the table, as indices into TableSet::outputs.
  std::vector<std::size_t> outputs;
};

/// The shards of each rank, in the order of the tables.
using Assignments = std::vector<std::vector<Assignment>>;

/// Returns the sum of `sizes`.
std::int64_t sum_of(const std::vector<std::int64_t>& sizes);

/// The bags to look up in this rank's shards, from the batches of all ranks. Bag `o * num_samples +
/// s` is sample s of the o-th output of this rank's assignments. Samples are in order of the ranks
/// that they come from.
struct LocalBags {
  std::int64_t num_samples = 0;
  at::Tensor ids;      // [N] int64, row numbers within a shard
  at::Tensor offsets;  // [outputs * num_samples + 1] int64
  at::Tensor weights;  // [N] float32; if undefined, each weight is 1
  /// The index in `ids` at which each output begins, and N at the end. Empty if the tables are on
  /// the CPU.
  std::vector<std::int64_t> output_begins;
  at::Tensor host_ids;  // `ids` in host memory; undefined if no table is cached
};

/// This rank's batch, or the exception that says why it is invalid.
struct OwnBatch {
  std::optional<KeyedJaggedTensor> batch;
  std::exception_ptr refusal;
  bool wants_weight_gradients = false;
};

/// Sends a batch to the ranks that hold its rows, in two messages. The first is an all-gather of
/// sizes. The second is an all-to-all of int64: each rank gets from every rank `outputs * batch`
/// lengths, `n` ids and, with weights, `ceil(n / 2)` pairs of weights. The constructor, `advance`,
/// `bags` and `return_weight_gradients` are collective. Not thread-safe.
class Input {
 public:
  virtual ~Input() = default;

  /// Waits for the first message and starts the second; does nothing if it was started already.
  /// Throws, at every call: the error of this rank's batch; Error(invalid_argument) if another rank
  /// refused its batch; Error(mismatch) if ranks differ in `fingerprint` (tables, plan, options).
  virtual void advance() = 0;
  /// Calls `advance` and waits for the second message. Returns the bags to look up on this rank,
  /// to be used on the current stream.
  virtual const LocalBags& bags() = 0;
  /// Sends gradients of sample weights back to the ranks that the samples come from. `from`: the
  /// gradients of `bags().weights`, in the same shape. Adds the gradients of this rank's batch to
  /// `to`, which has the shape of the batch's weights; `to` is undefined if this rank wants none.
  /// Requires: `returns_weight_gradients()` is true.
  virtual void return_weight_gradients(const at::Tensor& from, at::Tensor to) = 0;

  /// Returns the lengths of this rank's own batch on the tables' device. Call `bags` before.
  virtual const at::Tensor& lengths() = 0;

  const TableBatch& batch() const { return batch_; }  // this rank's own batch
  /// Returns the number of samples of each rank. Call `advance` before.
  const std::vector<std::int64_t>& batch_sizes() const { return batch_sizes_; }
  /// Returns whether any rank wants gradients of its sample weights. Call `advance` before.
  bool returns_weight_gradients() const { return returns_weight_gradients_; }

 protected:
  Input(const TableSet& tables, std::shared_ptr<const Assignments> assignments,
        std::shared_ptr<dist::Group> group, const OwnBatch& batch);

  // Indices of the fields in the header of a rank's batch, which is the message of sizes.
  static constexpr std::size_t kBatchSize = 0;  // kRefused: the rank's batch is invalid
  static constexpr std::size_t kFingerprint = 1;
  static constexpr std::size_t kWantsWeightGradients = 2;
  static constexpr std::size_t kNumFields = 3;
  static constexpr std::int64_t kRefused = -1;

  /// Writes the fields above to this rank's header.
  void write_header(std::int64_t* header, std::uint64_t fingerprint) const;
  /// Reads the fields above from the headers of all ranks, which the first message brought. Throws
  /// if a rank refused its batch or has another fingerprint. `stride`: elements of a header.
  void check_headers(const std::int64_t* headers, std::size_t stride);
  std::int64_t num_outputs(int rank) const;
  /// Returns the size of the second message (lengths, ids, weights) with which a rank that has
  /// `batch_size` samples sends `num_ids` of its ids to `rank`. Units: int64 elements.
  std::int64_t payload(int rank, std::int64_t batch_size, std::int64_t num_ids) const;
  /// Returns the size of the second message to each rank. Units: int64 elements.
  std::vector<std::int64_t> send_sizes() const;
  /// Returns the size of the second message from each rank. Units: int64 elements.
  std::vector<std::int64_t> receive_sizes() const;
  int rank() const { return group_->rank(); }

  std::shared_ptr<const Assignments> assignments_;
  std::shared_ptr<dist::Group> group_;
  bool is_weighted_;
  bool wants_weight_gradients_;
  bool returns_weight_gradients_ = false;
  TableBatch batch_;
  std::exception_ptr failure_;              // thrown again by later calls
  std::vector<std::int64_t> batch_sizes_;   // number of samples of each rank
  std::vector<std::int64_t> num_sent_;      // ids sent to each rank
  std::vector<std::int64_t> num_received_;  // ids received from each rank
  LocalBags bags_;
};

}  // namespace tessera::embedding
