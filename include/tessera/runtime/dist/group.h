#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace tessera::dist {

/// A collective that is under way. Not thread-safe.
class Pending {
 public:
  Pending() = default;  // of something that is over already
  Pending(c10::intrusive_ptr<c10d::Work> work, std::string what)
      : work_(std::move(work)), what_(std::move(what)) {}

  /// Returns when the collective is over on this rank (on CUDA: is in the current stream's order).
  /// Throws: Error(io) naming rank, group and what was sent, where a peer fails or is late.
  void wait();

 private:
  c10::intrusive_ptr<c10d::Work> work_;  // null: nothing to wait for
  std::string what_;
};

/// What a rank handed to collectives so far. Units: bytes, counted where c10d takes them: of an
/// all-gather the gathered tensor, of a reduce-scatter the whole one that goes in, of an
/// all-reduce or a broadcast the tensor, of an all-to-all what goes in, from rank to rank what is
/// sent. Nothing in a group of one rank.
struct Traffic {
  std::uint64_t all_gather = 0;
  std::uint64_t reduce_scatter = 0;
  std::uint64_t all_reduce = 0;
  std::uint64_t broadcast = 0;
  std::uint64_t all_to_all = 0;
  std::uint64_t sent = 0;
  friend bool operator==(const Traffic&, const Traffic&) = default;
};

/// The ranks along one axis of a mesh, as one of them sees it. A group of one rank that has no
/// backend copies. Every method that starts a collective is collective over the group: all ranks
/// call it in the same order. Owns its backend. Not thread-safe, apart from `traffic`.
class Group {
 public:
  /// Connects this rank with those that share a store. Collective.
  using Connect = std::function<c10::intrusive_ptr<c10d::Backend>(
      const c10::intrusive_ptr<c10d::Store>& store)>;

  /// A group of one rank. `device`: see `device()`.
  explicit Group(std::string name, at::Device device = at::kCPU);
  /// `store` is for what ranks tell each other beside the tensors; its keys are the group's own.
  /// Collective. Throws what `connect` throws.
  Group(std::string name, c10::intrusive_ptr<c10d::Store> store, Connect connect,
        at::Device device = at::kCPU);

  const std::string& name() const { return name_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Of small tensors that are made only to be sent.
  at::Device device() const { return device_; }
  /// Returns nullptr in a group that has no backend.
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }

  /// Connects the same ranks once more. Collectives of the new group may run in any order with
  /// those of this one, for users that cannot know in which order the ranks come to both. What it
  /// sends counts as this group's traffic. `purpose` stands in its name. Collective. Throws as
  /// `dist::connect`.
  std::shared_ptr<Group> separate(const std::string& purpose);

  /// Gathers equal parts of all ranks. Shape: `part` `[n]`, `whole` `[size * n]`, both contiguous.
  /// `what` names the tensor in errors.
  Pending all_gather(at::Tensor whole, at::Tensor part, const std::string& what);
  /// Sums `whole` over the ranks and leaves this rank its part. Shapes as for `all_gather`.
  Pending reduce_scatter(at::Tensor part, at::Tensor whole, const std::string& what);
  /// Sums in place.
  Pending all_reduce(at::Tensor tensor, const std::string& what);
  /// Replaces `tensor` by that of `root`, a rank of this group.
  Pending broadcast(at::Tensor tensor, int root, const std::string& what);
  /// Gives each rank a piece of `sent`, and puts together what each rank has for this one, both in
  /// order of rank. Shapes: contiguous of one dimension, cut by `num_sent` and `num_received`, one
  /// number for each rank; equal for the two ranks of a piece.
  Pending all_to_all(at::Tensor received, std::vector<std::int64_t> num_received, at::Tensor sent,
                     std::vector<std::int64_t> num_sent, const std::string& what);
  /// Gives each rank its part of `whole`, which is defined on `root` alone. Shapes as for
  /// `all_gather`. Blocks. From rank to rank, as Gloo's own scatter takes memory for a second
  /// whole.
  void scatter(at::Tensor part, const at::Tensor& whole, int root, const std::string& what);
  /// Sends a tensor to rank `to`, which receives it; what two ranks send each other arrives in
  /// order. Shape: the same on both, contiguous. Collective: no. Blocks.
  void send(at::Tensor tensor, int to, const std::string& what);
  /// Fills `tensor` with what rank `from` sends. Shape: the sender's, contiguous. Collective: no.
  /// Blocks.
  void receive(at::Tensor tensor, int from, const std::string& what);

  /// Returns the greatest value of all ranks. Blocks.
  double max(double value, const std::string& what);

  /// Returns 0, 1, 2, …: numbers what ranks tell each other through the store. Equal on all ranks
  /// that call it equally often.
  std::uint64_t next_number() { return next_number_++; }

  /// Returns what this rank has handed to collectives of the group so far. Thread-safe.
  Traffic traffic() const;

 private:
  Pending start(c10::intrusive_ptr<c10d::Work> work, const char* collective,
                const std::string& what) const;
  Pending start_sending(at::Tensor tensor, int to, const std::string& what);

  struct Counters {  // units: bytes
    std::atomic<std::uint64_t> all_gather = 0;
    std::atomic<std::uint64_t> reduce_scatter = 0;
    std::atomic<std::uint64_t> all_reduce = 0;
    std::atomic<std::uint64_t> broadcast = 0;
    std::atomic<std::uint64_t> all_to_all = 0;
    std::atomic<std::uint64_t> sent = 0;
  };

  std::string name_;
  c10::intrusive_ptr<c10d::Store> store_;
  Connect connect_;
  c10::intrusive_ptr<c10d::Backend> backend_;
  at::Device device_;
  int rank_ = 0;
  int size_ = 1;
  std::uint64_t next_number_ = 0;
  /// Shared with the groups separated from it.
  std::shared_ptr<Counters> counters_ = std::make_shared<Counters>();
};

}  // namespace tessera::dist
