#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "tessera/runtime/embedding/shard.h"

namespace tessera {

/// Reads batches ahead. While the trainer computes a batch, the ranks exchange the ids of the next
/// batch and the number of ids of the batch after it. Like torchrec's TrainPipelineSparseDist.
///
///     InputPipeline<Batch> batches(tables, read_batch, [](const Batch& b) { return b.sparse; });
///     while (auto item = batches.next()) {
///       auto pooled = tables->forward(std::move(item->input));  // and item->batch has the rest
///       ...
///     }
///
/// `next` is collective over the tables' mesh, so all ranks must have equally many batches. Up to
/// three batches are in memory: the one that `next` returned, and two that it has read ahead.
template <class Batch>
class InputPipeline {
 public:
  /// A batch, and its ids on their way to the ranks that hold the rows. Pass `input` to `forward`.
  struct Item {
    Batch batch;
    DistributedInput input;
  };

  /// `read`: returns the next batch; std::nullopt at the end. `sparse`: returns the ids of a batch.
  InputPipeline(std::shared_ptr<ShardedEmbeddingBagCollection> tables,
                std::function<std::optional<Batch>()> read,
                std::function<KeyedJaggedTensor(const Batch&)> sparse)
      : tables_(std::move(tables)), read_(std::move(read)), sparse_(std::move(sparse)) {}

  /// Returns the next batch; std::nullopt at the end. Throws what `read` throws; after that, do not
  /// call `next` again. If `sparse` throws or returns invalid ids, the forward of that batch throws
  /// on all ranks: the same error on this rank, an error that names this rank on the others.
  std::optional<Item> next() {
    fill(2);
    if (under_way_.empty()) return std::nullopt;
    if (under_way_.size() > 1) advance(under_way_[1].input);
    Item item = std::move(under_way_.front());
    under_way_.pop_front();
    fill(2);
    return item;
  }

 private:
  void fill(std::size_t num_batches) {
    while (!has_ended_ && under_way_.size() < num_batches) {
      std::optional<Batch> batch = read_();
      if (!batch) {
        has_ended_ = true;
        return;
      }
      DistributedInput input = distribute(*batch);
      under_way_.push_back({std::move(*batch), std::move(input)});
    }
  }

  DistributedInput distribute(const Batch& batch) {
    std::optional<KeyedJaggedTensor> ids;
    try {
      ids = sparse_(batch);
    } catch (...) {
      return tables_->refuse_batch(std::current_exception());
    }
    return tables_->distribute(*ids);
  }

  static void advance(DistributedInput& input) {
    try {
      input.advance();
    } catch (...) {
      // The forward of this batch throws the error again.
    }
  }

  std::shared_ptr<ShardedEmbeddingBagCollection> tables_;
  std::function<std::optional<Batch>()> read_;
  std::function<KeyedJaggedTensor(const Batch&)> sparse_;
  std::deque<Item> under_way_;
  bool has_ended_ = false;
};

}  // namespace tessera
