#pragma once

#include <exception>
#include <memory>
#include <vector>

#include "runtime/state/live_checkpoint.h"
#include "runtime/state/rendezvous.h"
#include "tessera/reshard/job_state.h"

namespace tessera::state {

/// One rank's part of a save: what it writes, and the steps after planning.
struct SaveJob {
  reshard::RankSave save;
  std::shared_ptr<const LiveState> live{};
  std::shared_ptr<const reshard::Plan> plan{};
  std::vector<std::vector<LocalShard>> held{};  // what to write: the trainer's memory, or a copy
  std::exception_ptr failure{};  // this rank's error, which the other ranks do not know yet

  /// Runs code that may fail on this rank only, and keeps its error for `raise_failure`.
  template <class Body>
  void hold_failure(const Body& body) {
    try {
      body();
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
  }
  /// Throws the held error. Call it where ranks exchange errors.
  void raise_failure() const {
    if (failure) std::rethrow_exception(failure);
  }

  /// Each rank writes its part, rank 0 joins them, each marks its part as complete, rank 0 moves
  /// all to the path. May run on any thread. Collective. Throws on all ranks if a rank fails.
  void run(Rendezvous& rendezvous);
};

}  // namespace tessera::state
