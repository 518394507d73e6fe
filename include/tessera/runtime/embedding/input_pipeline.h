#pragma once

#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "tessera/runtime/embedding/shard.h"

namespace tessera {

/// Lets batches travel to the ranks that hold their rows while others are computed: the next one's
/// ids, and of the one after that how many there are. What torchrec calls TrainPipelineSparseDist.
///
///     InputPipeline<Batch> batches(tables, read_batch, [](const Batch& b) { return b.sparse; });
///     while (auto item = batches.next()) {
///       auto pooled = tables->forward(std::move(item->input));  // and item->batch has the rest
///       ...
///     }
///
/// `next` is collective over the tables' mesh: all ranks have equally many batches. Up to three are
/// in memory.
template <class Batch>
class InputPipeline {
 public:
  /// A batch as it was read, and its ids, which are on their way or have come.
  struct Item {
    Batch batch;
    DistributedInput input;
  };

  /// `read`: returns the next batch, or nothing at the end. `sparse`: returns its bags of ids.
  InputPipeline(std::shared_ptr<ShardedEmbeddingBagCollection> tables,
                std::function<std::optional<Batch>()> read,
                std::function<KeyedJaggedTensor(const Batch&)> sparse)
      : tables_(std::move(tables)), read_(std::move(read)), sparse_(std::move(sparse)) {}

  /// Returns nothing when there is no more. Throws what reading throws. What `sparse` throws, or
  /// what is wrong with its bags, the batch's own forward throws, and that there was something all
  /// other ranks' then throw.
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
      // Thrown again by the forward of the batch that it is about.
    }
  }

  std::shared_ptr<ShardedEmbeddingBagCollection> tables_;
  std::function<std::optional<Batch>()> read_;
  std::function<KeyedJaggedTensor(const Batch&)> sparse_;
  std::deque<Item> under_way_;
  bool has_ended_ = false;
};

}  // namespace tessera
