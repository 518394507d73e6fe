#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "tessera/runtime/dist/mesh.h"

namespace tessera::state {

/// What ranks tell each other about saves and loads: through the store, over a connection of its
/// own, so that it may be waited for on another thread than the trainer's. Not thread-safe.
class Rendezvous {
 public:
  /// Collective in that all ranks make theirs in the same order.
  explicit Rendezvous(const dist::Mesh& mesh);

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// Returns what each rank says, by rank. Collective. Throws: Error(io) naming a rank that says
  /// nothing in time; then, and from then on, every call does.
  std::vector<std::string> exchange(const std::string& own, const std::string& what);

  /// Does `body` on every rank, and returns what each body returned, by rank. Collective. Throws on
  /// all ranks where one does: there its own, elsewhere one of its kind that names the rank.
  std::vector<std::string> together(const std::string& what,
                                    const std::function<std::string()>& body);

  /// How long rank 0 waits for the others.
  void set_timeout(std::chrono::milliseconds timeout);

 private:
  std::string get(const std::string& key) const;
  std::vector<std::string> collect(const std::string& prefix, const std::string& own,
                                   const std::string& what);

  int rank_;
  int size_;
  c10::intrusive_ptr<c10d::Store> store_;  // null: a process alone
  std::chrono::milliseconds timeout_{};
  std::string name_;
  std::uint64_t number_ = 0;  // of the next exchange
  std::string failure_;
};

}  // namespace tessera::state
