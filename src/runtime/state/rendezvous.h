#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "tessera/runtime/dist/mesh.h"

namespace tessera::state {

/// Exchanges texts between ranks during saves and loads. Has its own connection to the c10d store,
/// so another thread than the trainer's can use it. Not thread-safe.
class Rendezvous {
 public:
  /// Collective: all ranks construct their Rendezvous objects in the same order.
  explicit Rendezvous(const dist::Mesh& mesh);

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Sends `own` to all ranks and returns the texts of all ranks, by rank. `what` is for messages.
  /// Collective. Throws: Error(io) naming a rank that sends nothing in time; every later call
  /// throws the error again.
  std::vector<std::string> exchange(const std::string& own, const std::string& what);

  /// Calls this rank's `body`, and returns the results of all ranks, by rank. Collective. If `body`
  /// throws on a rank, all ranks throw: that rank its own error, the other ranks an error of the
  /// same kind that names the rank.
  std::vector<std::string> all_gather(const std::string& what,
                                      const std::function<std::string()>& body);

  /// Sets how long rank 0 waits for each other rank. The others wait longer for rank 0's answer.
  void set_timeout(std::chrono::milliseconds timeout);

 private:
  std::string get(const std::string& key) const;
  void acknowledge(const std::string& prefix, int num_readers) const;
  void wait_until_read(const std::string& prefix) const;
  void delete_keys(const std::string& prefix) const;
  std::vector<std::string> collect(const std::string& prefix, const std::string& own,
                                   const std::string& what);

  int rank_;
  int size_;
  c10::intrusive_ptr<c10d::Store> store_;  // null: a single process
  std::chrono::milliseconds timeout_{};
  std::string name_;
  std::uint64_t number_ = 0;  // number of the next exchange
  std::string failure_;
};

}  // namespace tessera::state
