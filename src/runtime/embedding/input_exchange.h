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
  FlatRange rows;                    // of the table
  FlatRange columns;                 // of the table
  bool has_all_rows = false;         // of the table
  std::vector<std::size_t> outputs;  // indices of the TableSet's outputs that look it up
};

/// The shards of each rank, in the order of the tables.
using Assignments = std::vector<std::vector<Assignment>>;

/// Returns the sum of `sizes`.
std::int64_t sum_of(const std::vector<std::int64_t>& sizes);

/// The bags of all ranks' batches that look up this rank's shards. Bag `o * num_samples + s` is
/// sample s of the o-th output of this rank's assignments. The samples of all ranks are in rank
/// order.
struct LocalBags {
  std::int64_t num_samples = 0;
  at::Tensor ids;      // [N] int64, row numbers within a shard
  at::Tensor offsets;  // [outputs * num_samples + 1] int64
  at::Tensor weights;  // [N] float32; if undefined, each weight is 1
};

/// A rank's batch, or the exception that says why the rank has none.
struct OwnBatch {
  std::optional<KeyedJaggedTensor> batch;
  std::exception_ptr refusal;
  bool wants_weight_gradients = false;
};

/// Sends a batch to the ranks that hold its rows, in two messages. The first is an all-gather of
/// sizes. The second is an all-to-all of int64: each rank gets from every rank `outputs * batch`
/// lengths, `n` ids and, with weights, `ceil(n / 2)` pairs of weights. Every method is collective.
/// Not thread-safe.
class Input {
 public:
  /// Starts the first message, and copies what the second message needs of the batch. If this
  /// rank's batch is invalid, `advance` throws on all ranks. `fingerprint`: must be equal on all
  /// ranks.
  Input(const TableSet& tables, std::shared_ptr<const Assignments> assignments,
        std::shared_ptr<dist::Group> group, const OwnBatch& batch, std::uint64_t fingerprint);

  /// Starts the second message; does nothing if it was started already. Throws, at every call: the
  /// problem of this rank's batch; Error(invalid_argument) if another rank refused its batch;
  /// Error(mismatch) if ranks have different fingerprints.
  void advance();
  /// Returns the bags to look up on this rank. Waits for the second message.
  const LocalBags& bags();

  const TableBatch& batch() const { return batch_; }  // this rank's own batch
  /// Returns the number of samples of each rank. Requires: `advance`.
  const std::vector<std::int64_t>& batch_sizes() const { return batch_sizes_; }

  /// Returns whether any rank wants gradients of its weights. Requires: `advance`.
  bool returns_weight_gradients() const { return returns_weight_gradients_; }
  /// Adds the gradients of the weights of this rank's batch to `to`. `from` has, on each rank, the
  /// gradients of `bags().weights`. Shape: `from` as `bags().weights`, `to` as the weights of this
  /// rank's batch. `to` is undefined if this rank wants no gradients. Requires:
  /// `returns_weight_gradients()`.
  void return_weight_gradients(const at::Tensor& from, at::Tensor to);

 private:
  /// What this rank sends for one output of one shard.
  struct Outgoing {
    const Assignment* assignment;
    TableBatch::Slice slice;
    int rank;
    std::int64_t begin = 0;  // in the ids sent to that rank
    std::int64_t num_ids = 0;
  };
  void count_ids();
  void pack();
  void send();
  void check_headers();
  void pack(const Outgoing& outgoing, std::int64_t* lengths, std::int64_t* ids, float* weights,
            std::int64_t* positions) const;
  /// What one rank sent for one output.
  struct Run {
    const std::int64_t* lengths;
    std::int64_t num_samples;
    const std::int64_t* ids = nullptr;
    const float* weights = nullptr;
    std::int64_t* offsets = nullptr;  // where to write the ends of the run's bags
    std::int64_t begin = 0;           // in the ids of all runs
    std::int64_t num_ids = 0;
  };
  void unpack();
  std::vector<const std::int64_t*> received_messages() const;
  std::vector<Run> received_runs() const;
  void allocate_bags();
  void place_runs(std::vector<Run>& runs);
  std::vector<std::int64_t> send_sizes() const;
  std::int64_t num_outputs(int rank) const;
  std::int64_t payload(int rank, std::int64_t batch_size, std::int64_t num_ids) const;
  int rank() const { return group_->rank(); }

  std::shared_ptr<const Assignments> assignments_;
  std::shared_ptr<dist::Group> group_;
  bool is_weighted_;
  bool wants_weight_gradients_;
  bool returns_weight_gradients_ = false;
  TableBatch batch_;
  std::vector<Outgoing> outgoing_;  // by rank, then by output
  std::exception_ptr failure_;      // every later call throws it again
  at::Tensor headers_;              // [ranks, 3 + ranks], see kBatchSize
  at::Tensor header_;
  at::Tensor sent_, received_;
  dist::Pending pending_;
  std::vector<std::int64_t> num_sent_;                // ids, by rank
  std::vector<std::int64_t> num_received_;            // ids, by rank
  std::vector<std::int64_t> batch_sizes_;             // by rank
  std::vector<std::vector<std::int64_t>> positions_;  // in the batch, of the ids sent to each rank
  bool has_advanced_ = false;
  bool has_arrived_ = false;
  LocalBags bags_;
};

}  // namespace tessera::embedding
