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

/// A collective that has started. Do not use or change its tensors before `wait`. Not thread-safe.
class Pending {
 public:
  Pending() = default;  // a collective that has finished
  Pending(c10::intrusive_ptr<c10d::Work> work, std::string what)
      : work_(std::move(work)), what_(std::move(what)) {}

  /// Waits until the collective has finished on this rank. (With NCCL, only the current CUDA stream
  /// waits.) Throws (with Gloo): Error(io) naming rank, group, tensor if a rank fails or is late.
  void wait();

 private:
  c10::intrusive_ptr<c10d::Work> work_;  // null: nothing to wait for
  std::string what_;
};

/// The bytes that this rank has passed to collectives so far. An all-gather counts its output,
/// other collectives count their input, `max` counts nothing. `sent` has the bytes of `send`, and
/// those that the root of a `scatter` sends. A group without a backend counts nothing.
struct Traffic {
  std::uint64_t all_gather = 0;
  std::uint64_t reduce_scatter = 0;
  std::uint64_t all_reduce = 0;
  std::uint64_t broadcast = 0;
  std::uint64_t all_to_all = 0;
  std::uint64_t sent = 0;
  friend bool operator==(const Traffic&, const Traffic&) = default;
};

/// The ranks along one axis of a mesh, seen from one of them. All ranks of the group must call the
/// collective methods in the same order. Without a backend (only in a group of one rank), they copy
/// the input to the output. Owns its backend. Not thread-safe, except `traffic`.
class Group {
 public:
  /// Connects this rank to the other ranks that share `store`, and returns the backend. Collective.
  using Connect = std::function<c10::intrusive_ptr<c10d::Backend>(
      const c10::intrusive_ptr<c10d::Store>& store)>;

  /// Makes a group of one rank, without a backend. `device`: see `device()`.
  explicit Group(std::string name, at::Device device = at::kCPU);
  /// Makes a group of the ranks that `connect` connects. The ranks also exchange small messages
  /// through `store`; no other group may use the keys of `store`. Collective. Throws what `connect`
  /// throws.
  Group(std::string name, c10::intrusive_ptr<c10d::Store> store, Connect connect,
        at::Device device = at::kCPU);

  const std::string& name() const { return name_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  /// Returns the device on which to create small tensors that are only sent.
  at::Device device() const { return device_; }
  /// Returns nullptr in a group that has no backend.
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }

  /// Returns a second group of the same ranks, with its own connection. Collectives of the old and
  /// the new group may run in any order, even in a different order on each rank. The two groups
  /// count their traffic together. `purpose` is appended to the new group's name. Collective.
  /// Throws: Error(io) if a rank does not connect in time.
  std::shared_ptr<Group> separate(const std::string& purpose);

  /// Starts to gather the inputs of all ranks, in rank order. `what` names the tensor in errors.
  /// Shape: `input` `[n]`, `output` `[size * n]`, both contiguous. Collective, as the next four.
  Pending all_gather(at::Tensor output, at::Tensor input, const std::string& what);
  /// Sums `input` over the ranks. Rank r gets the r-th range of n elements of the sum.
  /// Shape: `input` `[size * n]`, `output` `[n]`, both contiguous.
  Pending reduce_scatter(at::Tensor output, at::Tensor input, const std::string& what);
  /// Sums `tensor` over the ranks, in place. Shape: the same on all ranks, contiguous.
  Pending all_reduce(at::Tensor tensor, const std::string& what);
  /// Copies `tensor` from the group's rank `root` to all ranks. Shape: equal on all, contiguous.
  Pending broadcast(at::Tensor tensor, int root, const std::string& what);
  /// Sends the r-th split of `sent` to rank r, and fills `received` with the splits from all ranks,
  /// both in rank order. Shapes: 1-d and contiguous. `num_sent` and `num_received` give the
  /// elements of each split; sender and receiver must state the same number.
  Pending all_to_all(at::Tensor received, std::vector<std::int64_t> num_received, at::Tensor sent,
                     std::vector<std::int64_t> num_sent, const std::string& what);
  /// Sends the r-th range of n elements of rank `root`'s `input` to rank r. Ignores `input` on
  /// other ranks. Shapes: as for `reduce_scatter`. Collective. Blocks. Uses `send` and `receive`,
  /// because Gloo's scatter would allocate a second `input`.
  void scatter(at::Tensor output, const at::Tensor& input, int root, const std::string& what);
  /// Sends a tensor to rank `to`, another rank, which must call `receive`. Messages between two
  /// ranks arrive in order. Shape: the same on both ranks, contiguous. Collective: no. Blocks.
  void send(at::Tensor tensor, int to, const std::string& what);
  /// Fills `tensor` with what rank `from` sends. Shape: the same as on the sender, contiguous.
  /// Collective: no. Blocks.
  void receive(at::Tensor tensor, int from, const std::string& what);

  /// Returns the largest value of all ranks, NaN if any is NaN. Collective. Blocks.
  double max(double value, const std::string& what);

  /// Returns 0, 1, 2, …: a number for the next message through the store. Ranks get the same number
  /// if they have called this method equally often.
  std::uint64_t next_number() { return next_number_++; }

  /// Returns the sum of the traffic of this group and of its relatives by `separate`. Thread-safe.
  Traffic traffic() const;

 private:
  /// Calls `begin`, which starts a collective of the backend.
  template <class Begin>
  Pending start(const char* collective, const std::string& what, Begin&& begin) const;
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
  /// Shared with groups made by `separate`.
  std::shared_ptr<Counters> counters_ = std::make_shared<Counters>();
};

}  // namespace tessera::dist
