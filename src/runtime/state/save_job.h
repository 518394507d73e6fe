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

  /// Runs code that may fail on this rank only; `raise_failure` throws its error later.
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

  /// Writes the parts, joins them, marks them as complete, and moves the checkpoint to its path.
  /// May run on any thread. Collective. Throws on all ranks if a rank fails.
  void run(Rendezvous& rendezvous);
};

}  // namespace tessera::state
