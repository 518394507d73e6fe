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

/// A shard of a table, on some rank.
struct Assignment {
  std::size_t table = 0;
  FlatRange rows;                    // of the table
  FlatRange columns;                 // of the table
  bool has_all_rows = false;         // of the table
  std::vector<std::size_t> outputs;  // of the TableSet: what features it is looked up by
};

/// By rank, in the order of the tables.
using Assignments = std::vector<std::vector<Assignment>>;

/// Returns the sum of what ranks send or get.
std::int64_t sum_of(const std::vector<std::int64_t>& sizes);

/// Bags of what a rank holds, from the batches of all ranks: bag `o * num_samples + s` is sample s
/// of the o-th output of its assignments, in their order. Samples are in order of rank.
struct LocalBags {
  std::int64_t num_samples = 0;
  at::Tensor ids;      // [N] int64, rows of the shards
  at::Tensor offsets;  // [outputs * num_samples + 1] int64
  at::Tensor weights;  // [N] float32; undefined: all 1
};

/// A rank's batch; where it has none, why.
struct OwnBatch {
  std::optional<KeyedJaggedTensor> batch;
  std::exception_ptr refusal;
  bool wants_weight_gradients = false;
};

/// A batch on its way to the ranks that hold its rows, in two messages: how much there is (one
/// all-gather), and lengths, ids and weights (one all-to-all of int64: of rank d's part `outputs *
/// batch` lengths, `n` ids and, where there are weights, `ceil(n / 2)` pairs of them). Every method
/// is collective. Not thread-safe.
class Input {
 public:
  /// Starts the first message; has taken all it needs of the batch. What is wrong with this rank's
  /// batch all ranks throw in `advance`. `fingerprint`: what ranks have to have in common.
  Input(const TableSet& tables, std::shared_ptr<const Assignments> assignments,
        std::shared_ptr<dist::Group> group, const OwnBatch& batch, std::uint64_t fingerprint);

  /// Starts the second message, once. Throws, each time: what was wrong with this rank's batch;
  /// Error(invalid_argument) where another rank refused its batch; Error(mismatch) where a rank has
  /// another fingerprint.
  void advance();
  /// Returns what this rank looks up. Waits for the second message.
  const LocalBags& bags();

  const TableBatch& batch() const { return batch_; }  // this rank's own
  /// Number of samples of each rank. Requires: `advance`.
  const std::vector<std::int64_t>& batch_sizes() const { return batch_sizes_; }

  /// Whether some rank wants gradients of its weights. Requires: `advance`.
  bool returns_weight_gradients() const { return returns_weight_gradients_; }
  /// Adds the gradients of this rank's weights to `to`, from those of `bags().weights` on all
  /// ranks. Shape: both as the weights; `to` is undefined where this rank wants none. Requires:
  /// `returns_weight_gradients()`.
  void return_weight_gradients(const at::Tensor& from, at::Tensor to);

 private:
  /// What one feature is looked up by on one rank, of this rank's batch.
  struct Part {
    const Assignment* assignment;
    TableBatch::Slice slice;
    int rank;
    std::int64_t begin = 0;  // among the ids sent to that rank
    std::int64_t num_ids = 0;
  };
  void count_ids();
  void pack();
  void send();
  void check_headers();
  void pack(const Part& part, std::int64_t* lengths, std::int64_t* ids, float* weights,
            std::int64_t* positions) const;
  void unpack();
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
  std::vector<Part> parts_;     // by rank, and for each in the order of its outputs
  std::exception_ptr failure_;  // thrown again by whatever is called
  at::Tensor headers_;          // [ranks, 3 + ranks], see kBatchSize
  at::Tensor header_;
  at::Tensor sent_, received_;
  dist::Pending pending_;
  std::vector<std::int64_t> num_sent_;                // ids, by rank
  std::vector<std::int64_t> num_received_;            // ids, by rank
  std::vector<std::int64_t> batch_sizes_;             // by rank
  std::vector<std::vector<std::int64_t>> positions_;  // of the ids sent to each rank
  bool has_advanced_ = false;
  bool has_arrived_ = false;
  LocalBags bags_;
};

}  // namespace tessera::embedding
